"""A campaign that branches off another one at a checkpoint: a run directory of its own, with the checkpoint, the prepared data, a
config and the lineage. The parent is only read, and may go on meanwhile.

Owns what a fork takes over. All of it appears at once, by the rename of the new run directory, which comes last.
"""

import os
import re
import secrets
import shlex
import shutil
import stat
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from pydantic import BaseModel

from checkpoint import manifest
from checkpoint.errors import CheckpointError
from checkpoint.fence import fsync_directory
from checkpoint.naming import step_path, steps
from checkpoint.verification import verify
from resilient import access, ledger
from resilient.config import Config, ConfigError, Problem, load, write
from resilient.config.document import as_text
from resilient.config.errors import COMMAND_LINE, shown_change
from resilient.config.sections.fault_tolerance import Tier
from resilient.exits import EnvironmentUnusable
from resilient.identity import record
from resilient.identity.classes import CLASSES
from resilient.identity.comparison import Change, compare
from resilient.identity.fingerprint import Fingerprint, Lineage, at, keys_of
from resilient.lineage import duplicate
from resilient.lineage.duplicate import Duplicated
from resilient.processes import must_be_run_directory

_AT_STEP = re.compile(r"(?P<run_dir>.+)@(?P<step>\d{1,8})")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_TRIES = 3  # at a newest checkpoint, which a parent that runs may delete meanwhile


@dataclass(frozen=True)
class Forked:
    """What came of it.

    Attributes:
        changes: what is told or refused at a resume and is otherwise in the fork.
        files: how they came.
    """

    parent: Path
    run_dir: Path
    step: int
    changes: tuple[Change, ...]
    files: Duplicated

    def lines(self) -> list[str]:
        """For a person."""
        return [
            f"{self.run_dir} branches off {self.parent} at step {self.step} ({self.files})",
            *(f"  {each}" for each in self.changes),
            f"`resilient run {self.run_dir / 'config.yaml'}` goes on from there",
        ]


def parent_of(word: str) -> tuple[Path, int | None]:
    """What `RUN_DIR[@STEP]` says; a directory that is called so comes first. Raises ValueError if the step is no number."""
    if Path(word).is_dir():
        return Path(word), None
    if (found := _AT_STEP.fullmatch(word)) is not None:
        return Path(found["run_dir"]), int(found["step"])
    run_dir, at, step = word.rpartition("@")
    if at and Path(run_dir).is_dir():
        raise ValueError(f"the step behind @ is a number of up to 8 digits, and not {step!r}")
    return Path(word), None


def fork(parent: Path, step: int | None, new: Path, overrides: Sequence[str]) -> Forked:
    """Branch off.

    Args:
        step: None: the newest checkpoint that is sound.
        new: the fork's run directory, which must not be there, or be empty, and is not inside of the parent.
        overrides: `KEY=VALUE`.

    Raises:
        ConfigError: a key or value is wrong or wants arrays that the checkpoint does not have, there is no such checkpoint, or
            `new` is taken or inside of the parent.
        EnvironmentUnusable: the parent is no run directory, or not to be obeyed; or something cannot be read or written.
    """
    parent, new = parent.absolute(), new.absolute()
    must_be_run_directory(parent)
    file = parent / "config.yaml"
    before = load(file)
    settings = [f"run_dir={as_text(str(new))}", *overrides]
    mode = load(file, settings).run_dir_mode
    access.must_be_ours(file, parent, mode)
    access.restrict(mode)
    _must_be_free(parent, new, overrides)
    durable = _relocated(before.checkpoint.tiers[-1].path, before.run_dir, parent)
    tries = _TRIES if step is None else 1
    for attempt in range(tries):
        chosen = _sound(durable, step)
        try:
            return _fork(parent, before, durable, chosen, new, overrides)
        except FileNotFoundError as error:
            if attempt + 1 == tries:
                raise EnvironmentUnusable(f"{error.filename} has vanished meanwhile: has the parent deleted it?") from error
        except OSError as error:
            raise EnvironmentUnusable(f"cannot write {error.filename or new}: {error.strerror or error}") from error
    raise AssertionError


def _must_be_free(parent: Path, new: Path, overrides: Sequence[str]) -> None:
    if any(each.partition("=")[0] == "run_dir" for each in overrides):
        raise ConfigError([Problem("run_dir", None, "is the second argument, and no KEY=VALUE", None, COMMAND_LINE)])
    if Path(os.path.realpath(parent)) in Path(os.path.realpath(new)).parents:
        why = f"{new} is inside of {parent}, which is only read; name a directory elsewhere"
        raise ConfigError([Problem("", None, why, None, COMMAND_LINE)])
    if new.is_symlink() or (new.exists() and (not new.is_dir() or any(new.iterdir()))):
        raise ConfigError([Problem("", None, f"{new} is there already; a fork needs a directory of its own", None, COMMAND_LINE)])


def _sound(durable: Path, step: int | None) -> int:
    """The step to branch off at."""
    there = steps(durable) if durable.is_dir() else []
    if step is not None and step not in there:
        known = f"there are {', '.join(map(str, there[-8:]))}" if there else "there is none"
        message = f"there is no durable checkpoint of step {step} in {durable}; {known}"
        raise ConfigError([Problem("", None, message, None, COMMAND_LINE)])
    why = f"there is no durable checkpoint in {durable}, and what a script has saved by itself cannot be branched off"
    for each in reversed(there) if step is None else [step]:
        try:
            verify(step_path(durable, each))
        except CheckpointError as error:
            why = str(error)
            continue
        return each
    raise EnvironmentUnusable(why)


def _fork(parent: Path, before: Config, durable: Path, step: int, new: Path, overrides: Sequence[str]) -> Forked:
    source = step_path(durable, step)
    generation = manifest.read(source).generation
    state = record.state_of(source) or {}
    config = _config(parent, before, state, new, overrides)
    own = config.checkpoint.tiers[-1].path
    known = record.of_state(state) or record.read(parent)
    if known is None:
        known = Fingerprint(keys=keys_of(before, None), contents=record.contents(before))
    changed = {each.partition("=")[0] for each in overrides}
    other_data = any(key == "data" or key.startswith("data.") for key in changed)
    prepared = None if other_data else known.prepared
    fingerprint = _with_keys(known, config, contents=record.contents(config) if other_data else known.contents)
    _must_fit(source, step, known, fingerprint, changed)
    changes = tuple(compare(known, fingerprint))
    lineage = Lineage(str(parent), before.name, step, generation, {each.key: (each.old, each.new) for each in changes}, time.time())
    fingerprint = msgspec.structs.replace(fingerprint, prepared=prepared, lineage=lineage)

    files = Duplicated()
    group = config.run_dir_mode == "group"
    new.parent.mkdir(parents=True, exist_ok=True)
    building = new.with_name(f".{new.name}.{secrets.token_hex(4)}.forking")
    unfinished = f".{source.name}.forking"
    elsewhere = not own.is_relative_to(new)
    root = own if elsewhere else building / own.relative_to(new)
    placed: list[Path] = []  # outside of the run directory
    try:
        building.mkdir(mode=access.MODES[config.run_dir_mode])
        if elsewhere and own.is_dir() and steps(own):
            message = f"{own} has checkpoints already; name another place for the fork's"
            raise ConfigError([Problem(f"checkpoint.tiers.{len(config.checkpoint.tiers) - 1}.path", str(own), message)])
        if elsewhere:
            placed += [own] if not own.exists() else [own / unfinished, step_path(own, step)]
        root.mkdir(parents=True, exist_ok=True)
        duplicate.tree(source, root / unfinished, files, group=group)
        (root / unfinished).rename(step_path(root, step))
        fsync_directory(root)
        for directory in sorted({Path(name).parent for name in prepared or ()}):
            _data(parent / directory, building / directory, files, group=group)
        write(config, building / "config.yaml")
        record.write(building, fingerprint)
        _begin_ledger(building, lineage, changes)
        with suppress(FileNotFoundError):
            new.rmdir()  # empty
        building.rename(new)
        fsync_directory(new.parent)
    except BaseException:
        for each in (building, *placed):
            shutil.rmtree(each, ignore_errors=True)
        raise
    return Forked(parent, new, step, changes, files)


def _must_fit(source: Path, step: int, known: Fingerprint, wanted: Fingerprint, named: Collection[str]) -> None:
    """Raises ConfigError where the fork wants other arrays than the checkpoint has. Args: named: keys that were given."""
    misfits = record.misfits(source, known.keys, wanted.keys)
    problems = []
    for key in [each for each in misfits if each in named] or misfits:
        old, new = shown_change(known.keys.get(key), wanted.keys.get(key))
        why = f"the checkpoint of step {step} in {source.parent} does not have the arrays that this wants; allowed: {old}"
        problems.append(Problem(key, new, f"{why}. To train another model, begin with a run_dir of its own", None, COMMAND_LINE))
    if problems:
        raise ConfigError(problems)


def _with_keys(known: Fingerprint, config: Config, contents: Any) -> Fingerprint:
    """The fingerprint with the keys of another config; what only machines can tell stays."""
    return msgspec.structs.replace(known, keys={**known.keys, **keys_of(config, None)}, contents=contents)


def _config(parent: Path, before: Config, state: Any, new: Path, overrides: Sequence[str]) -> Config:
    """The parent's config, but what determines the numbers as it was when the checkpoint was written; then what is asked for."""
    then, now = state.get("config"), before.model_dump(mode="json")
    settings: list[str] = []
    if isinstance(then, dict):
        for key, kind in CLASSES.items():
            above, _, last = key.rpartition(".")
            inside = at(then, above) if above else then
            if kind != "free" and isinstance(inside, dict) and last in inside and inside[last] != at(now, key):
                settings.append(f"{key}={as_text(inside[last])}")
    named = {each.partition("=")[0] for each in overrides}
    if "data.path" in named and "data.text" not in named:
        settings.append("data.text=null")
    if _NAME.fullmatch(new.name):
        settings.append(f"name={as_text(new.name)}")
    config = load(parent / "config.yaml", [*settings, f"run_dir={as_text(str(new))}", *overrides])
    tiers: list[Tier] = []
    for tier in config.checkpoint.tiers:
        path = _relocated(_relocated(tier.path, before.run_dir, new), parent, new)
        tiers.append(tier.model_copy(update={"path": path}))
    durable = tiers[-1].path
    if durable == before.checkpoint.tiers[-1].path:  # beside the parent's, never in it
        tiers[-1] = tiers[-1].model_copy(update={"path": durable.with_name(f"{durable.name}-{new.name}")})
    moves = ((before.run_dir, new), (parent, new))
    changed = {
        "checkpoint": config.checkpoint.model_copy(update={"tiers": tiers}),
        "logging": _moved(config.logging, moves),
        "entrypoint": _words_moved(config.entrypoint, moves) if config.is_script else config.entrypoint,
    }
    return config.model_copy(update=changed)


def _moved(value: Any, moves: Sequence[tuple[Path, Path]]) -> Any:
    """A part of a config with its paths in one run directory as those in another."""
    if isinstance(value, BaseModel):
        return value.model_copy(update={name: _moved(getattr(value, name), moves) for name in type(value).model_fields})
    for old, new in moves:
        value = _relocated(value, old, new) if isinstance(value, Path) else value
    return value


def _words_moved(entrypoint: str, moves: Sequence[tuple[Path, Path]]) -> str:
    """The words of a script with their paths, also behind `=`, as `_moved`."""

    def one(word: str) -> str:
        name, equals, text = word.rpartition("=")
        return f"{name}{equals}{_moved(Path(text), moves)}" if text.startswith("/") else word

    return shlex.join(one(word) for word in shlex.split(entrypoint))


def _relocated(path: Path, old: Path, new: Path) -> Path:
    """A path in one run directory as one in another."""
    return new / path.relative_to(old) if path.is_relative_to(old) else path


def _data(source: Path, target: Path, files: Duplicated, *, group: bool) -> None:
    """Prepared data with what lies beside it, but for what is hidden or unfinished. What is gone the preparation makes again."""
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir()) if source.is_dir() else ():
        if not path.name.startswith(".") and path.suffix != ".tmp" and stat.S_ISREG(path.lstat().st_mode):
            files.files[duplicate.file(path, target / path.name, group=group)] += 1
    fsync_directory(target)


def _begin_ledger(directory: Path, lineage: Lineage, changes: Sequence[Change]) -> None:
    fields = {
        "parent": lineage.parent,
        "parent_name": lineage.parent_name,
        "step": lineage.step,
        "changes": [{"key": each.key, "from": each.old, "to": each.new} for each in changes],
    }
    with ledger.Ledger(directory) as lines:
        # With the checkpoint's generation, so that those of the fork are newer than it.
        lines.event("forked", fields, generation=lineage.generation)
