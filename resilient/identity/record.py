"""Where the fingerprint of a campaign lies: `identity.json` in its run directory, and the state of its checkpoints.

Owns that file, and where else a fingerprint is to be had: of a checkpoint, or of the config of a run directory that has none.
"""

import logging
import os
import secrets
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from platform import python_version
from typing import Any

import msgspec

from checkpoint import manifest, metadata
from checkpoint.errors import CheckpointError
from checkpoint.naming import step_path, steps
from checkpoint.safe_name import safe_name
from checkpoint.sampled import sampled
from checkpoint.typed import built
from resilient.config import Config, ConfigError, Problem, load
from resilient.entry import parse
from resilient.exits import EnvironmentUnusable
from resilient.identity.arrays import OPTIMIZER, reshaped
from resilient.identity.classes import FILES
from resilient.identity.fingerprint import Content, Fingerprint, keys_of
from resilient.version import commit

log = logging.getLogger(__name__)

FILE = "identity.json"
STATE = "identity"  # of a checkpoint's state
LIMIT_BYTES = 16 << 20
_PACKAGES = ("torch", "numpy", "triton", "flash-attn", "tokenizers", "transformers", "accelerate", "lightning")


def decode(text: bytes) -> Fingerprint:
    """Raises ValueError."""
    try:
        return _checked(msgspec.json.decode(text, type=built(Fingerprint)))
    except RecursionError as error:
        raise ValueError(str(error)) from None


def read(run_dir: Path) -> Fingerprint | None:
    """The fingerprint in a run directory; None where there is none, or none that can be read."""
    path = run_dir / FILE
    try:
        with path.open("rb") as file:
            return decode(file.read(LIMIT_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log.warning("%s is not used: %s", path, error)
        return None


def write(run_dir: Path, fingerprint: Fingerprint) -> None:
    """Put it there, at once or not at all. Raises OSError."""
    path = run_dir / FILE
    new = path.with_name(f"{FILE}.{secrets.token_hex(4)}.new")
    try:
        new.write_bytes(msgspec.json.format(msgspec.json.encode(fingerprint), indent=1) + b"\n")
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise


def plain(run_dir: Path) -> Mapping[str, Any] | None:
    """What `read` gives, as JSON for the state of a checkpoint."""
    found = read(run_dir)
    return msgspec.to_builtins(found) if found is not None else None


def recorded(config: Config) -> tuple[Fingerprint | None, bool]:
    """The fingerprint of the campaign that a config goes on with; None for one that has not begun. And whether it had to be made of
    the config that an earlier version has left in the run directory. Raises EnvironmentUnusable."""
    found = read(config.run_dir)
    if found is not None:
        return found, False
    durable = config.checkpoint.tiers[-1].path
    for step in reversed(saved_steps(config)):
        state = state_of(step_path(durable, step))
        if state is not None:
            kept = of_state(state)
            if kept is not None:
                return kept, False
            break
    return _of_config_file(config.run_dir / "config.yaml"), True


def saved_steps(config: Config) -> list[int]:
    """The steps on the durable tier, ascending. Raises EnvironmentUnusable where it cannot be read."""
    durable = config.checkpoint.tiers[-1].path
    try:
        return steps(durable) if durable.is_dir() else []
    except OSError as error:
        raise EnvironmentUnusable(f"cannot read {error.filename or durable}: {error.strerror}") from error


def state_of(path: Path) -> Mapping[str, Any] | None:
    """The state that was saved with a checkpoint, without torch or zarr; None where it cannot be read."""
    try:
        return metadata.read(path, manifest.read(path).files).state
    except (CheckpointError, OSError) as error:
        log.warning("%s: %s", path, error)
        return None


def of_state(state: Mapping[str, Any]) -> Fingerprint | None:
    """The fingerprint in the state of a checkpoint; None where its writer has left none."""
    try:
        return _checked(msgspec.convert(state.get(STATE), built(Fingerprint)))
    except (ValueError, RecursionError):
        return None


def _of_config_file(path: Path) -> Fingerprint | None:
    """Of a run directory as earlier versions left it. Which keys its config said itself, and under which versions, nobody knows."""
    if not path.is_file():
        return None
    try:
        config = load(path)
    except ConfigError:
        return None
    return Fingerprint(keys=keys_of(config, None), contents=contents(config))


def misfits(path: Path | None, before: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, ...]:
    """The keys whose change gives arrays that a checkpoint does not hold.

    Args:
        path: of the checkpoint, if there is one; one of weights alone fits every optimizer.
        before, now: what keys come to, then and now.
    """
    weights_alone = path is not None and not (path / "optimizer").is_dir()
    return tuple(key for key in reshaped(before, now) if key != OPTIMIZER or not weights_alone)


def contents_of(paths: Sequence[Path]) -> list[Content]:
    """What is in files, in their order. Raises OSError."""
    return [Content(*each) for each in sampled(paths)]


def contents(config: Config) -> dict[str, list[Content]]:
    """What is in the files that the config names, by key; a key of which one cannot be read is left out: who needs it says so."""
    found = {}
    for key, paths in files(config).items():
        try:
            found[key] = contents_of(paths)
        except OSError as error:
            log.debug("%s: %s", key, error)
    return found


def files(config: Config) -> dict[str, list[Path]]:
    """The files that the config names, by key."""
    if config.is_script:
        script = parse(config.entrypoint).script
        return {"entrypoint": [script]} if script is not None else {}
    data = config.data
    prefixes = [] if data.path is None else [data.path] if isinstance(data.path, Path) else [each.path for each in data.path]
    text = data.text if isinstance(data.text, list) else []
    singles = (data.tokenizer.vocab_file, data.tokenizer.merges_file)
    named = (
        text,
        [Path(f"{prefix}.{suffix}") for prefix in prefixes for suffix in ("idx", "bin")],
        *([] if each is None else [each] for each in singles),
    )
    return {key: paths for key, paths in zip(FILES, named, strict=True) if paths}


def versions() -> dict[str, str]:
    """Of the packages of this installation that compute."""
    own = commit()
    found = {"python": python_version(), "resilient": version("resilient") + (f" ({own[:7]})" if own else "")}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def prepared(run_dir: Path, names: Sequence[str]) -> dict[str, Content]:
    """The contents of those of these files of a run directory that are there. Raises OSError."""
    there = [name for name in names if (run_dir / name).is_file()]
    return dict(zip(there, contents_of([run_dir / name for name in there]), strict=True))


def note_prepared(run_dir: Path, made: Sequence[Path]) -> list[Problem]:
    """Keep what the preparation has made, at first; later, say so if it is not the same.

    Args:
        made: files; those outside of the run directory are left alone.

    Raises OSError.
    """
    found = read(run_dir)
    names = [os.path.relpath(path, run_dir) for path in made if Path(os.path.abspath(path)).is_relative_to(run_dir)]  # noqa: PTH100
    if found is None or not names:
        return []
    now = prepared(run_dir, names)
    if found.prepared is None:
        write(run_dir, msgspec.structs.replace(found, prepared=now))
        return []
    wrong = [name for name, content in now.items() if found.prepared.get(name, content) != content]
    if not wrong:
        return []
    message = (
        f"{', '.join(wrong)} in {run_dir}, as prepared now, is not what the campaign was trained on, and no step was taken "
        "with it; put the prepared files back, or go on with --accept data.text"
    )
    return [Problem("data.text", None, message)]


def _checked(found: Fingerprint) -> Fingerprint:
    for name in found.prepared or ():
        safe_name(name)
    return found
