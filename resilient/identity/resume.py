"""What is done at the start of a job about what has changed since the campaign began, before anything runs.

`examine` reads and refuses, and changes nothing; `Resumption.keep` writes the fingerprint, once the run directory is this job's.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from checkpoint.naming import step_path
from resilient import ledger
from resilient.config import Config, ConfigError, Layout, Problem
from resilient.config.errors import COMMAND_LINE, shown, shown_change
from resilient.config.fields import Section
from resilient.config.source import read as read_source
from resilient.identity import record
from resilient.identity.classes import CLASSES, FILES, kind_of
from resilient.identity.comparison import Change, compare
from resilient.identity.fingerprint import Accepted, Content, Fingerprint, at, given_among, keys_of, merged


@dataclass(frozen=True)
class Known:
    """What the run directory says of the campaign before this job.

    Attributes:
        fingerprint: None for one that has not begun.
        adopted: it was made of an earlier version's config.
        given: keys that the config of this job says itself.
    """

    fingerprint: Fingerprint | None
    adopted: bool
    given: tuple[str, ...]

    @classmethod
    def of(cls, config: Config, file: Path, overrides: Sequence[str]) -> "Known":
        """Args: file, overrides: that the config was loaded from."""
        found, adopted = record.recorded(config)
        return cls(found, adopted, tuple(given_among(read_source(file, overrides).values)))

    def keep(self, config: Config) -> tuple[Config, list[str]]:
        """The config with the defaults that the campaign began with, where this version has others; a line for each of them."""
        if self.fingerprint is None or config.is_script:
            return config, []
        before = self.fingerprint
        raw, now = config.model_dump(mode="json"), keys_of(config, None)
        notes = []
        for key, value in now.items():
            left_open = key in self.given or key in before.given or key in FILES or at(raw, key) == "auto"
            if left_open or value is None or before.keys.get(key) in (None, value):
                continue
            changed = _with(config, key, before.keys[key])
            if changed is not None:
                config = changed
                old, new = shown_change(before.keys[key], value)
                notes.append(f"{key} stays {old}, as the campaign began; the default is {new} now")
        return config, notes

    def resume(
        self, config: Config, layout: Layout | None, accept: Sequence[str] = (), versions: Mapping[str, str] | None = None
    ) -> "Resumption":
        """See `examine`."""
        return examine(config, layout, self, accept, versions)


def versions_here(config: Config, in_job: bool) -> dict[str, str]:
    """The versions of packages that ranks will have; of a container around them only its image is known."""
    container = config.slurm.container
    if in_job and container is not None and not container.driver:
        return {"image": str(container.image)}
    return record.versions()


def _with(config: Config, key: str, value: Any) -> Config | None:
    """The config with another value; None where this version does not allow it."""

    def put(section: Section, parts: Sequence[str]) -> Section:
        name, *inner = parts
        if inner:
            return section.model_copy(update={name: put(getattr(section, name), inner)})
        if isinstance(section, Config):
            return section.model_copy(update={name: getattr(Config.model_validate({name: value}), name)})
        return type(section).model_validate({**section.model_dump(), name: value})

    try:
        found = put(config, key.split("."))
    except ValidationError:
        return None
    assert isinstance(found, Config)
    return found


@dataclass(frozen=True)
class Resumption:
    """What a job goes on as.

    Attributes:
        fingerprint: from now on.
        changes: those that are told, the accepted ones among them.
        accepted: keys.
    """

    fingerprint: Fingerprint
    changes: tuple[Change, ...] = ()
    accepted: frozenset[str] = frozenset()

    def notes(self) -> list[str]:
        """A line for each change."""
        return [f"changed: {each}{' (accepted)' * (each.key in self.accepted)}" for each in self.changes]

    def reported(self) -> tuple[Mapping[str, object], ...]:
        """What `config_changed` says of each change."""
        return tuple(
            {"key": each.key, "from": each.old, "to": each.new, "accepted": each.key in self.accepted} for each in self.changes
        )

    def keep(self, run_dir: Path) -> None:
        """Put the fingerprint into the run directory, which is this process's alone. Raises OSError."""
        record.write(run_dir, self.fingerprint)


def examine(
    config: Config,
    layout: Layout | None,
    known: Known,
    accept: Sequence[str] = (),
    versions: Mapping[str, str] | None = None,
) -> Resumption:
    """Compare the config with what the campaign was trained with. Changes nothing.

    Args:
        layout: None where it is not the config's doing.
        accept: keys whose change is accepted.
        versions: of packages, as ranks will have them; None where that is not known.

    Raises:
        ConfigError: something has changed that makes another campaign, and is not accepted; or a key to accept is none of these.
        EnvironmentUnusable: the durable tier cannot be read.
    """
    _must_be_refused(accept)
    before = known.fingerprint
    now = Fingerprint(
        keys=keys_of(config, layout), given=list(known.given), contents=record.contents(config), versions=dict(versions or {})
    )
    newest = max(record.saved_steps(config), default=None)
    if before is None or not _is_trained(config, newest):
        return Resumption(merged(None, now, ()) if before is None else _without_failed_starts(now, before))
    changes = [*compare(before, now, keys_of(Config(), None)), *_prepared(config, before)]
    refused = [each for each in changes if each.kind == "refused" and each.key not in accept]
    if refused:
        path = step_path(config.checkpoint.tiers[-1].path, newest) if newest is not None else None
        misfits = record.misfits(path, before.keys, now.keys)
        raise ConfigError([_problem(config, each, newest, fits=each.key not in misfits) for each in refused])
    taken = [each for each in changes if each.kind == "refused"]
    if known.adopted:  # what has changed before nobody has kept; the person knows
        own = {each.key for each in taken}
        taken += [Change(key, None, now.keys.get(key), "refused") for key in accept if key not in own]
    accepted = [Accepted(each.key, each.old, each.new, newest, time.time()) for each in taken]
    told = [each for each in changes if each.kind == "told"]
    after = Fingerprint(keys=now.keys, given=now.given, contents=now.contents, versions=now.versions, accepted=accepted)
    changed = {each.key for each in (*told, *taken)}
    return Resumption(merged(before, after, changed), (*told, *taken), frozenset(each.key for each in taken))


def _without_failed_starts(now: Fingerprint, before: Fingerprint) -> Fingerprint:
    """Nothing was trained yet: what was recorded at a start that came to nothing does not count."""
    return Fingerprint(keys=now.keys, given=now.given, contents=now.contents, versions=now.versions, lineage=before.lineage)


def _must_be_refused(accept: Sequence[str]) -> None:
    problems = []
    for key in accept:
        if key not in CLASSES or kind_of(key) != "refused":
            why = f"is {kind_of(key)} to change, and needs no --accept" if key in CLASSES else "is no key whose change is refused"
            problems.append(Problem("", None, f"--accept {shown(key)}: {key} {why}", None, COMMAND_LINE))
    if problems:
        raise ConfigError(problems)


def _is_trained(config: Config, newest: int | None) -> bool:
    """Whether anything goes on that was computed before: a durable checkpoint, or steps that some tier may hold."""
    try:
        found = [part for part in ledger.parts(config.run_dir / ledger.METRICS) if part.exists()]
        return newest is not None or any(part.stat().st_size for part in found)
    except OSError:
        return False


def _prepared(config: Config, before: Fingerprint) -> list[Change]:
    """Prepared data that is there and is not what it was. What is gone is prepared again, and compared then."""
    if before.prepared is None:
        return []
    try:
        now = record.prepared(config.run_dir, list(before.prepared))
    except OSError:
        return []
    key = "data.text"
    return [
        Change(key, f"{name}: {_mark(before.prepared[name])}", f"{name}: {_mark(content)}", "refused")
        for name, content in now.items()
        if before.prepared[name] != content
    ][:1]


def _mark(content: Content) -> str:
    return f"{content.size_bytes:,} bytes, sha256 {content.sampled_sha256[:8]}"


def _problem(config: Config, change: Change, newest: int | None, *, fits: bool) -> Problem:
    """Args: fits: the arrays of its checkpoints do, with the new value as well."""
    run_dir, key = config.run_dir, change.key
    value = "VALUE" if key in FILES else json.dumps(change.new)
    where = "" if newest is None else f" (the newest checkpoint is of step {newest})"
    old, new = shown_change(change.old, change.new)
    began = f"the campaign in {run_dir} was trained with {old}{where}"
    if not fits:
        why = "and with another value its checkpoints do not have the arrays that are wanted"
        return Problem(key, new, f"{began}, {why}. Set it back, or begin anew with it in another run_dir")
    message = (
        f"{began}, and another value makes another campaign. "
        f"Set it back; or go on with it all the same: --accept {key}; or branch off with it: "
        f"resilient fork {run_dir} NEW_RUN_DIR {key}={value}"
    )
    return Problem(key, new, message)
