"""Writing a file or directory so that it appears whole or not at all.

Owns the names in between, and what may be replaced.
"""

import json
import os
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from checkpoint.errors import naming
from checkpoint.metadata import ATTRIBUTE, NAME
from checkpoint.naming import step_of
from checkpoint.tools.locations import STORAGE
from checkpoint.tools.refusal import WRONG, Refusal

_IDENTITY = "identity.json"
OF_A_RUN = frozenset(
    "attention.json bad_nodes.json chain.jsonl chain.lock checkpoints config.yaml data diagnosis.md driver.log evacuate.json "
    f"evacuate.lock evaluations.jsonl events.jsonl {_IDENTITY} incidents job.sh logs metrics.jsonl metrics.prom mlruns model.yaml "
    f"profile report.html sinks {STORAGE} tensorboard wandb".split()
)
"""Names in a run directory that a run writes, beside those that begin with a dot."""

HUGGING_FACE = frozenset(("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"))
"""Names of which an export to `hf` has some, the first one always."""


def check(output: Path, *, force: bool) -> Path:
    """The absolute path of what is to be written. Raises Refusal where it may not be.

    Args:
        output: file or directory to be.
        force: replace an earlier export or an empty directory; never a checkpoint, what contains other things, or other files.
    """
    output = Path(os.path.abspath(output))  # noqa: PTH100  (a link is replaced, not followed)
    if any(step_of(parent) is not None for parent in (output.resolve(), *output.resolve().parents)):
        raise Refusal(f"{output} is in a checkpoint, or is called like one; choose another place", WRONG)
    run_dir = _run_that_writes(output.parent.resolve() / output.name)
    if run_dir is not None:
        raise Refusal(f"{output} is of the run in {run_dir}, which writes it itself; choose another place", WRONG)
    if not os.path.lexists(output):
        return output
    if not force:
        raise Refusal(f"{output} is there already; --force replaces it", WRONG)
    if not (_is_replaceable_directory(output) if output.is_dir() else output.is_file() and _is_torch_file(output)):
        raise Refusal(f"{output} is no export, or has other things in it, and is not replaced; choose another place", WRONG)
    return output


def _run_that_writes(output: Path) -> Path | None:
    """The run directory in which a path is one that a run writes, or lies in one."""
    for above in output.parents:
        if any(os.path.lexists(above / name) for name in (STORAGE, _IDENTITY)):
            name = output.relative_to(above).parts[0]
            stem = next((each for each in OF_A_RUN if "." in each and name.startswith(f"{each}.")), name)  # driver.log.1
            if name.startswith(".") or stem in OF_A_RUN:
                return above
    return None


def _is_replaceable_directory(path: Path) -> bool:
    names = {each.name for each in path.iterdir()}
    if not names:
        return True
    if "config.json" in names and names <= HUGGING_FACE:
        return all((path / name).is_file() for name in names)
    about = _zarr_node(path)
    return about is not None and ATTRIBUTE in about["attributes"] and _has_only_arrays(path)


def _has_only_arrays(path: Path) -> bool:
    """Whether a Zarr v3 group or array has in it only what belongs to one."""
    about = _zarr_node(path)
    if about is None:
        return False
    others = [each for each in path.iterdir() if each.name != NAME]
    if about["node_type"] == "group":
        return all(_has_only_arrays(each) for each in others)
    inside = (name for _, folders, files in os.walk(path / "c") for name in (*folders, *files))
    return all(each.name == "c" for each in others) and all(name.isdecimal() for name in inside)


def _zarr_node(path: Path) -> dict[str, Any] | None:
    """What the metadata of a Zarr v3 group or array says, None where there is none."""
    try:
        found = json.loads((path / NAME).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    known = isinstance(found, dict) and found.get("node_type") in ("group", "array") and isinstance(found.get("attributes"), dict)
    return found if known else None


def _is_torch_file(path: Path) -> bool:
    """Whether a file is what torch.save writes: a zip archive with a pickle and a version in its one folder."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = {tuple(name.split("/")[1:]) for name in archive.namelist()}
    except (OSError, ValueError, zipfile.BadZipFile):
        return False
    return {("data.pkl",), ("version",)} <= names


@contextmanager
def appearing(output: Path, *, force: bool) -> Iterator[Path]:
    """Give a path beside `output` to write to, a file or a directory; it becomes `output` if nothing is raised, durably.

    Raises Refusal as `check`, and OSError, which names `output` where writing failed.
    """
    output = check(output, force=force)
    output.parent.mkdir(parents=True, exist_ok=True)
    beside = output.with_name(f".{output.name}.{os.getpid()}.part")
    try:
        with naming(output):
            yield beside
            _sync(beside)
            check(output, force=force)
            _replace(beside, output)
    except OSError as error:
        if isinstance(error.filename, str) and Path(error.filename).is_relative_to(beside):
            error.filename = str(output)
        raise
    finally:
        _remove(beside)


def _replace(new: Path, output: Path) -> None:
    if not output.is_dir() or output.is_symlink():
        if new.is_dir() and os.path.lexists(output):
            output.unlink()
        new.replace(output)
    else:
        old = output.with_name(f".{output.name}.{os.getpid()}.old")
        output.rename(old)
        try:
            new.rename(output)
        except OSError:
            old.rename(output)
            raise
        _remove(old)
    _sync_one(output.parent)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    for inside, _, names in os.walk(path):
        for name in names:
            _sync_one(Path(inside) / name)
        _sync_one(Path(inside))
    if path.is_file():
        _sync_one(path)


def _sync_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
