"""What a training script says to the runtime: six calls.

`init`, `phase`, `beat`, `computed`, `should_stop`, `report`. Without a supervisor each does nothing, so the same script runs under
torchrun or alone. None of them costs a system call: they write to memory that the agent shares (`resilient.heartbeat`).

This module is also the one face that the runtime shows to a training script, so the campaign's config is to be had here.
"""

import errno
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Literal

from resilient.config import (
    Config,
    ConfigError,
    Dealing,
    Layout,
    Problem,
    against_compiling,
    dealing,
    layout,
    load,
    notes,
    reduces_every,
    settle,
    spans,
    write,
)
from resilient.exits import EnvironmentUnusable
from resilient.heartbeat.layout import PHASES, TOLD
from resilient.heartbeat.worker_side import WorkerRegion
from resilient.identity import record
from resilient.main import command_line
from resilient.script.progress import DRAIN_VARIABLE, ON_STOP_VARIABLE, Progress, observe
from resilient.steptime.work import RankWork, Work

__all__ = [
    "BadNumbersError",
    "Config",
    "ConfigError",
    "Context",
    "Dealing",
    "EnvironmentUnusable",
    "Layout",
    "Problem",
    "RankWork",
    "UnrecoverableError",
    "Work",
    "accepted_keys",
    "against_compiling",
    "beat",
    "command_line",
    "computed",
    "dealing",
    "decided_here",
    "identity",
    "init",
    "layout",
    "load_config",
    "phase",
    "record_config",
    "reduces_every",
    "report",
    "settle",
    "should_stop",
    "spans",
    "stop_is_due",
]

log = logging.getLogger(__name__)

REGION_VARIABLE = "RESILIENT_HEARTBEAT_REGION"
GENERATION_VARIABLE = "RESILIENT_GENERATION"
RUN_DIR_VARIABLE = "RESILIENT_RUN_DIR"
SESSION_VARIABLE = "RESILIENT_SESSION"
GUARD_VARIABLE = "RESILIENT_GUARD"
DEVICE_VARIABLE = "RESILIENT_DEVICE"  # cpu or cuda: what all ranks compute on where the config leaves it to the machine
CHAOS_VARIABLE = "RESILIENT_CHAOS"  # module whose `arm(context)` is called in each rank; empty where faults are not allowed
COLLECTIVE_TIMEOUT_VARIABLE = "RESILIENT_COLLECTIVE_TIMEOUT_S"


@dataclass(frozen=True)
class Context:
    """Who this process is. Ranks and sizes as torchrun names them; `generation` counts the restarts of the campaign.

    `session` is for `checkpoint.Snapshots`; None where nobody keeps snapshots. `skip` holds first and last step of each stretch
    whose data is to be left out. `go_back_to` is for scripts that keep checkpoints of their own: those of later steps are invalid
    and must be deleted; it is set from a roll-back until a step is finished. The runtime clears its own places by itself.
    `collective_timeout_s` is what process groups are to be made with, so that a hang is judged before a collective times out; None
    without a supervisor. Groups that are made without a timeout have it. `device` is what all ranks compute on, `cpu` or `cuda`,
    whatever this node has; None without a supervisor.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    generation: int
    run_dir: Path | None
    supervised: bool
    session: Path | None = None
    skip: tuple[tuple[int, int], ...] = ()
    go_back_to: int | None = None
    collective_timeout_s: float | None = None
    device: str | None = None

    def skips(self, step: int) -> bool:
        """Whether the data of this step is to be left out."""
        return any(first <= step <= last for first, last in self.skip)


class BadNumbersError(Exception):
    """Raised by a training script whose loss or gradients are not finite, or far off, and not by one batch's fault: roll back.

    Args:
        since: the first step, 1-based, whose numbers were bad; the run goes back to a checkpoint from before it. None: the step
            that is being computed.
        kind: what is bad about them.
    """

    def __init__(self, message: str, *, since: int | None = None, kind: Literal["not_finite", "loss_spike"] = "not_finite") -> None:
        super().__init__(message)
        self.since, self.kind = since, kind


class UnrecoverableError(Exception):
    """Raised by a training script when trying again cannot help: the run ends at once, exit 70, with the message alone."""


_region: WorkerRegion | None = None
_progress: Progress | None = None  # what is observed of a script that says nothing


def observe_progress() -> Progress | None:
    """Have this rank's optimizer steps counted, for a script that does not beat by itself; called by the runtime, once."""
    global _progress
    if _region is not None and _progress is None:
        on_stop = os.environ.get(ON_STOP_VARIABLE, "raise")
        saved_step = json.loads(os.environ.get(GUARD_VARIABLE, "{}")).get("saved_step")
        rank = int(os.environ.get("RANK", "0"))
        drain_s = float(os.environ[DRAIN_VARIABLE]) if DRAIN_VARIABLE in os.environ else None
        _progress = observe(_region, rank=rank, on_stop=on_stop, saved_step=saved_step, drain_s=drain_s)  # type: ignore[arg-type]
        if _progress is not None:
            _progress.watcher = _watcher
    return _progress


def init() -> Context:
    """Attach to the supervisor, where there is one; call it first. May be called again."""
    global _region
    env = os.environ
    if _progress is not None:
        _progress.expect_words()
    path = env.get(REGION_VARIABLE)
    if path is not None and _region is None:
        _region = WorkerRegion(Path(path))
    run_dir, session, timeout_s = env.get(RUN_DIR_VARIABLE), env.get(SESSION_VARIABLE), env.get(COLLECTIVE_TIMEOUT_VARIABLE)
    guard = json.loads(env.get(GUARD_VARIABLE, "{}"))
    return Context(
        rank=int(env.get("RANK", "0")),
        local_rank=int(env.get("LOCAL_RANK", "0")),
        world_size=int(env.get("WORLD_SIZE", "1")),
        local_world_size=int(env.get("LOCAL_WORLD_SIZE", "1")),
        generation=int(env.get(GENERATION_VARIABLE, "0")),
        run_dir=Path(run_dir) if run_dir is not None else None,
        supervised=_region is not None,
        session=Path(session) if session is not None else None,
        skip=tuple((first, last) for first, last in guard.get("skip", ())),
        go_back_to=guard.get("go_back_to"),
        collective_timeout_s=float(timeout_s) if timeout_s is not None else None,
        device=env.get(DEVICE_VARIABLE),
    )


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read and check a config, with what it leaves to the machine decided. Raises ConfigError with every problem that was found."""
    config = decided_here(load(path, overrides))
    for note in notes(path, overrides) if os.environ.get("RANK", "0") == "0" else ():
        log.info("%s", note)
    return config


def decided_here(config: Config) -> Config:
    """The config with what it leaves to its run directory and this machine decided; the runtime has done it already."""
    if "auto" not in (config.train.precision, config.train.compile):
        return config
    from resilient.decided import decided  # not needed under a supervisor

    return decided(config)[0]


def record_config(config: Config) -> None:
    """Write the config into its run directory, for later runs to keep what was decided; a supervisor does it itself.

    Raises OSError, also where a supervisor works in that directory now; ConfigError where the file there is somebody else's.
    """
    from resilient.driver.lease import PATIENCE_S, holder  # not needed under a supervisor
    from resilient.run_dir_config import must_not_be_foreign

    must_not_be_foreign(config.run_dir)
    config.run_dir.mkdir(parents=True, exist_ok=True)
    if who := holder(config.run_dir, PATIENCE_S):
        why = f"in use by {who}; stop that run first, or give this one another run_dir"
        raise OSError(errno.EBUSY, why, str(config.run_dir))
    write(config, config.run_dir / "config.yaml")


def identity(config: Config) -> Mapping[str, object] | None:
    """The fingerprint of the campaign, for the state of its checkpoints (under `identity`, where a fork finds it); None without a
    supervisor."""
    return record.plain(config.run_dir)


def accepted_keys(config: Config) -> frozenset[str]:
    """The keys of the config whose change was accepted by `--accept` since the campaign began."""
    found = record.read(config.run_dir)
    return frozenset(each.key for each in found.accepted) if found is not None else frozenset()


Watcher = Callable[[str | None, int], None]

_watcher: Watcher | None = None


def watch(watcher: Watcher) -> None:
    """Have it called in the training thread: with the name of each phase that begins and 0, or None and a step that is finished.

    For the injection of faults; nothing else changes what a training script does.
    """
    global _watcher
    _watcher = watcher


class _Phase:
    __slots__ = ("_before", "_code")

    def __init__(self, code: int) -> None:
        self._code = code
        self._before = 0

    def __enter__(self) -> None:
        if _region is not None:
            _go_on()
            if _progress is not None:
                _progress.leave_phases()
            self._before = _region.enter(self._code | TOLD)
        if _watcher is not None:
            _watcher(PHASES[self._code], 0)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # A phase that raised stays in the region, for it may be where the worker fails, until the script is known to have gone on.
        # A generator that is closed has not failed.
        global _raised_from
        if _region is None:
            return
        if kind is None or kind is GeneratorExit:
            _raised_from = None
            _region.enter(self._before)
        else:
            _raised_from = self._before


_raised_from: int | None = None  # the phase before one of the script's that was left by an exception, and is in the region still


def _go_on() -> None:
    """The script has gone on: what was raised in a phase that it told, it has caught."""
    global _raised_from
    if _raised_from is not None and _region is not None:
        _region.enter(_raised_from)
        _raised_from = None


_CODES = {name: code for code, name in enumerate(PHASES)}


def phase(name: str) -> _Phase:
    """Context manager: what the training thread is doing: `load`, `data`, `step`, `snapshot` or `eval`. May be nested.

    It is taken at its word: for as long as it lasts, the runtime infers no other phase.

    Raises:
        KeyError: there is no phase of that name.
    """
    return _Phase(_CODES[name])


def infer(name: str) -> None:
    """For the runtime's own loops: what the training thread does as far as they know, until they infer something else.

    Where the script tells a phase at the moment, that stays.
    """
    if _region is not None:
        _go_on()
        if _progress is not None:
            _progress.go_on()
        code, before = _CODES[name], _region.phase
        if before != code and not before & TOLD:
            _region.enter(code)
            if not before and _progress is not None:
                _progress.loop_begins()
    if _watcher is not None:
        _watcher(name, 0)


def loop_comes() -> None:
    """For the runtime's own loops: one comes, and beats after each of its steps."""
    if _progress is not None:
        _progress.loop_comes()


_left: tuple[CodeType, int] | None = None  # where a loop over a generator of the runtime's own was left


def loop_left(frame: FrameType | None) -> None:
    """Such a loop is left in this frame, by `break` or by an exception of its body: its generator cannot tell which.

    Args:
        frame: None where the interpreter ends.
    """
    global _left
    _left = (frame.f_code, frame.f_lasti) if frame is not None else None


def failed(error: BaseException) -> None:
    """This ends the rank. Where it has passed through the body of such a loop, a step is where the rank failed."""
    at = error.__traceback__
    while at is not None:
        if _region is not None and _left == (at.tb_frame.f_code, at.tb_lasti):
            _region.enter(_CODES["step"])
        at = at.tb_next


def ended() -> None:
    """The script is over and has not failed: what it has left to threads and to `atexit` has all the time there is."""
    if _region is not None:
        _go_on()
        if _progress is not None:
            _progress.over()
        if not _region.phase & TOLD:
            _region.enter(_CODES["start"])


def beat(step: int) -> None:
    """Say that optimizer step `step` (1-based) is finished. All ranks beat every step."""
    if _region is not None:
        _go_on()
        if _progress is not None:
            _progress.stand_back(step)
        _region.beat(step)
    if _watcher is not None:
        _watcher(None, step)


def computed(seconds: float) -> None:
    """Say for how long this rank's GPU has computed since this was last said, without what it waited for others.

    By this a slow GPU is told from those that wait for it; without it, by the time of the training thread. All ranks say it once a
    step, before they beat; of which steps, and of which part of their work, is the same on all that have the same to do.
    """
    if _region is not None:
        _region.computed(seconds)


def should_stop() -> str | None:
    """At a step boundary, before the first step too: the reason to save and return now, else None.

    All ranks must ask at every boundary; they all get the reason at the same one, without talking to each other.
    """
    if _region is None:
        return None
    return _region.stop_reason(None if _progress is None else _progress.boundary())


def stop_is_due() -> bool:
    """Between `beat` and the boundary of that step: whether `should_stop` will have a reason there.

    Ranks that do much in between, as a validation, may leave it. They learn of it at different times, and must agree on it first.
    """
    return _region is not None and _region.stop_is_due()


def report(metrics: Mapping[str, object], *, event: str | None = None) -> None:
    """Hand over a line of metrics (from one rank), or with `event` a line of the ledger.

    The values are plain: numbers, text, None, lists and dicts of them. What was reported survives the death of the worker.
    """
    if _region is None:
        return
    line = dict(metrics)
    if _progress is not None and event is None and "step" in line:
        told = _progress.leave_lines()
        line = {**line, **told, **metrics}
    _region.report(event, line)
