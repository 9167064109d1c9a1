"""The progress of a training script that says nothing: its optimizer steps are counted, and the process beats for it.

Owns the count, by which a stop is agreed on (`resilient.script.stop`), and the phases that can be told apart (`data` inside a
DataLoader, `snapshot` while a checkpoint is written, else `step`). What the script says itself by `resilient.worker` wins, each
word for itself: beats, phases, metrics, and whether it asks to stop. One that beats and reports no metrics has its steps told by
its beats.

An iteration begins with the first step of an optimizer that has stepped since the last one began: so several optimizers that take
turns, one in each parameter's backward hook, or one that is replaced by another count as one. Micro batches whose gradients are
accumulated and steps that a gradient scaler leaves out are no optimizer steps. All ranks count the same, for each begins at 0.

Of a script without an optimizer of torch nothing is counted; checkpoints are its progress, and collectives tell whether it hangs
(`resilient.script.collectives`).
"""

import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from resilient import clock
from resilient.heartbeat.layout import NOT_BEATEN, PHASES, TOLD
from resilient.heartbeat.worker_side import WorkerRegion
from resilient.script import collectives, spawned
from resilient.script.files import ScriptFiles, common_place
from resilient.script.stop import OnStop, ScriptStop

ON_STOP_VARIABLE = "RESILIENT_ON_STOP"
DRAIN_VARIABLE = "RESILIENT_DRAIN_S"
SAVED = "script_checkpoint"  # the event of a checkpoint that the script has written by itself
TIER = "script"  # from where it goes on: its own checkpoint
LINES_S = 0.3  # least time between two lines of metrics: agents report about as often
FRAMES = 10  # above a hook, in which the caller of an optimizer's step is looked for
APART_S = 1.0  # files that were finished so long before the next one is begun are another checkpoint
STARTED_S = 60.0  # until then, a script that has taken no step may be writing down what it starts with
STATES_READ = 16  # parameters whose optimizer state is asked for the number of the step

_START, _DATA, _STEP, _SNAPSHOT, _EVAL = (PHASES.index(name) for name in ("start", "data", "step", "snapshot", "eval"))


class Progress:
    """One per rank. Everything but the noting of files happens in the thread that trains.

    Attributes:
        count: optimizer steps of this process.
        last_step_s: what the last one took; None before the second.
        watcher: see `resilient.worker.watch`.
        first_step: the handle of the hook `before_first_step`, until it was called.

    Invariants: nothing is told before the first step, nor after `stand_back`.
    """

    def __init__(
        self,
        region: WorkerRegion,
        *,
        first_rank: bool,
        on_stop: OnStop,
        saved_step: int | None = None,
        drain_s: float | None = None,
    ) -> None:
        self._region, self._first_rank, self._saved_step = region, first_rank, saved_step
        self._stop = ScriptStop(on_stop, drain_s)
        self.first_step: Any = None
        self._loaded = False  # an optimizer had a state before its first step, or the script has loaded one, if only an empty one
        self.count = 0
        self.last_step_s: float | None = None
        self.watcher: Callable[[str | None, int], None] | None = None
        self._base = 0  # the step that the script went on from
        self._uncounted = 0  # steps that its optimizer has taken, or loads, without having trained
        self._silent = False  # the script has said that it will speak for itself, and has not yet
        self._beating = True
        self._over = False
        self._loop_comes = False  # one of the runtime's own, which beats after each of its steps
        self._phases = True
        self._lines = first_rank
        self._stepped: set[int] = set()  # optimizers, by id, since the present iteration began
        self._thread = threading.main_thread().ident
        self._step = 0  # that was finished last
        self._seen = 0  # steps, by whomever they were counted
        self._reported = 0  # of those, that lines of the script cover
        self._line_step, self._line_t, self._line_data_s = 0, 0.0, 0.0  # as of the last line of metrics; before the first step, 0
        self._untimed = 0  # steps since the last line of which nobody knows when they began: the first, where no loader is
        self._observed_t = clock.now()
        self._first_data_t: float | None = None
        self._unfinished = False  # a file that was begun is not there
        self._writers = 0  # functions that write, one within the other
        self._raised_from: int | None = None  # the phase before one that was left by an exception, and is in the region still
        self.files = ScriptFiles(self._saving)

    # -- what the script says ------------------------------------------------------------------------------------------

    def expect_words(self) -> None:
        """The script has called `init`: it gets until its second step to say something."""
        self._silent = self.is_silent()

    def loop_comes(self) -> None:
        """A loop of the runtime's own will beat, however many steps optimizers take until its first step is done."""
        self._loop_comes = True
        if self._line_t:  # of steps before it, as those of one that looks for a learning rate, nothing is counted on
            self._region.begin_again()

    def stand_back(self, step: int) -> None:
        """The script beats by itself, and has finished this step."""
        if self._beating:
            self._beating = False
            self._region.observe(False)
            self._line_t = 0.0
        self.go_on()
        if not self._first_rank:
            return
        if self._line_t == 0.0 or step <= self._line_step:  # nobody knows when it began
            self._line_t, self._untimed = clock.now(), 1
            self._reported_up_to(step - 1)
        self._report_step(step)

    def leave_phases(self) -> None:
        """The script tells a phase by itself: where nothing has been inferred so far, nothing will be."""
        self.go_on()
        self._phases = False

    def loop_begins(self) -> None:
        """A loop of the runtime's own begins, whose phases are inferred: what the script has imported since is watched, too."""
        self.files.wrap()

    def leave_lines(self) -> dict[str, object]:
        """The script reports metrics of its steps by itself, now a line of them: what that does not say of time."""
        self._lines = False
        self._region.reported(NOT_BEATEN)
        steps, self._reported = self._seen - self._reported, self._seen
        if not self.last_step_s or not steps:  # a line more of the same step
            return {}
        return {"step_s": self.last_step_s, **({"steps": steps} if steps > 1 else {})}

    def boundary(self) -> int | None:
        """The number of the present step boundary, if it is counted here; the script asks whether it is to stop."""
        self._stop.is_off = True
        return self.count if self._beating and self.count and not self._loop_comes else None

    def is_silent(self) -> bool:
        """Whether nothing tells yet where the script stands: neither a step of an optimizer nor the script."""
        return self._beating and self.count == 0 and not self._over

    # -- what is observed ----------------------------------------------------------------------------------------------

    def before_first_step(self, optimizer: Any, _args: Any = None, _kwargs: Any = None) -> None:
        """An optimizer is about to step for the first time; called by torch. What it has of a state then, the script has loaded."""
        if _makes_state_only():
            return
        self.first_step.remove()
        values = (value for state in _states(optimizer) for value in state.values() if hasattr(value, "any"))
        self._loaded = self._loaded or any(bool(value.any()) for value in values)

    def loading(self, load_state_dict: Callable[..., None]) -> Callable[..., None]:
        """The `load_state_dict` of torch's optimizers: SGD without momentum has no state, and scripts load that all the same."""

        @functools.wraps(load_state_dict)
        def loads(*args: Any, **kwargs: Any) -> None:
            load_state_dict(*args, **kwargs)
            self._loaded = True

        return loads

    def after_step(self, optimizer: Any, _args: Any = None, _kwargs: Any = None) -> None:
        """An optimizer has stepped; called by torch."""
        stepped, key, begins = self._stepped, id(optimizer), True
        if key in stepped:
            if len(stepped) > 1:
                self._stepped = {key}
        elif _makes_state_only():
            self._uncounted = 1
            return
        else:
            stepped.add(key)
            begins = len(stepped) == 1
        if begins and self._silent and _left_out(optimizer):
            return  # a script that speaks for itself may try it again before it says anything
        if begins:
            self.count += 1
        if not self._beating or self._loop_comes or (self._silent and self.count == 1):
            return
        may_stop = self._stop.stepped(key, counts=begins)
        if begins:
            self._report_iteration(optimizer)
        if may_stop and self._line_t and not self._stop.is_off and self._region.stop_reason(self.count) is not None:
            self._stop.begin(lambda optimizer: optimizer in self._stepped, lambda: not _makes_state_only())
        if begins and self.watcher is not None:
            self.watcher(None, self._base + self.count)

    def _report_iteration(self, optimizer: Any) -> None:
        """Another iteration has begun."""
        count = self.count
        if self._line_t == 0.0:
            self._begin(optimizer)
        self.go_on()
        self._region.beat(self._base + count)
        if self.files:
            self.report_files(count - 1)
        if self._first_rank:
            self._report_step(self._base + count)

    def _begin(self, optimizer: Any) -> None:
        """The first step that is told."""
        self._silent = False
        self._thread = threading.get_ident()
        self._base = self._went_on_from(optimizer)
        self._region.observe(True)
        self.files.take()  # what was written before any step is no progress
        self.files.wrap()
        if self._first_rank:
            self._region.report("resumed", {"step": self._base, "tier": TIER})
        self._line_t = self._first_data_t or clock.now()
        self._untimed = 0 if self._first_data_t else 1
        self._reported_up_to(self._base + self.count - 1)
        self._raised_from = None
        if not self._region.phase & TOLD:
            self._region.enter(_STEP)

    def _went_on_from(self, optimizer: Any) -> int:
        """The step from which the script went on, as the state of its optimizer tells after the first one.

        Of a state without a number, as momentum is, or of none, the newest checkpoint's is taken, if the script has loaded a state;
        else 0.
        """
        done = 0 if _left_out(optimizer) else self.count
        steps = [int(state["step"]) for state in _states(optimizer) if "step" in state]
        if not steps and self._loaded:
            return self._saved_step or 0
        found = max(steps, default=0) - done
        # Whether the step that made a state is in the number that was loaded depends on when the script that saved it made one.
        saved = self._saved_step
        if saved is not None and self._uncounted and self._loaded and saved in (found, found - 1):
            return saved
        return max(0, found - self._uncounted)

    def _report_step(self, step: int, *, last: bool = False) -> None:
        self._step = step
        self._seen += not last
        now = clock.now()
        steps, since_s = step - self._line_step, now - self._line_t
        timed = steps - self._untimed
        if since_s < LINES_S and (self._seen > 1 or not timed) and not last:
            return
        data_s = self._region.data_s - self._line_data_s
        self.last_step_s = since_s / timed if timed else None
        if self._lines:
            line = {
                "step": step,
                "step_s": self.last_step_s,
                "steps_per_s": timed / since_s if timed and since_s else None,
            }
            self._region.report(None, {**line, "data_s": data_s, **({"steps": steps} if steps > 1 else {})})
        self._line_t, self._untimed = now, 0
        self._reported_up_to(step)

    def _reported_up_to(self, step: int) -> None:
        self._line_step, self._line_data_s = step, self._region.data_s
        if self._lines:
            self._region.reported(step)

    def report_files(self, count: int) -> None:
        """Tell of the checkpoint that was written after so many steps: whoever wrote it has gone on, so it is whole."""
        files = self.files.take()
        steps_are_seen = self._line_t > 0
        files = [each for each in files if steps_are_seen or each.t >= self._observed_t + STARTED_S]
        if not files or not self._beating or self._unfinished:
            return
        stall_s = sum(each.stall_s for each in files)
        if steps_are_seen:
            self._line_t = min(self._line_t + stall_s, clock.now())
        fields = {"step": self._base + count, "path": str(common_place(files)), "files": len(files)}
        self._region.report(SAVED, {**fields, "bytes": sum(each.size_bytes for each in files), "stall_s": round(stall_s, 6)})

    def ends(self) -> None:
        """The script has ended, in whatever way it could notice."""
        if self.files:
            self.report_files(self.count)
        if self._first_rank and (self._beating or self._lines) and self._line_t and self._step > self._line_step:
            self._report_step(self._step, last=True)

    def over(self) -> None:
        """The script has come to its end: no further step need come, nor a collective."""
        self.go_on()
        if self.is_silent():
            self._over = True
            self._region.observe(False)

    def _silence(self) -> None:
        """In a process that the script has forked: the region is its parent's."""
        self._beating = self._lines = False
        self._thread = self._raised_from = None
        self._stop.is_off = True

    @contextmanager
    def _saving(self) -> Iterator[None]:
        if not self.count and self.files and not self._writers and self.files.idle_s() >= APART_S:
            self.report_files(0)
        self._unfinished = True
        self._writers += 1
        try:
            if not self._infers() or not (self._line_t or self._region.phase):
                yield
            else:
                before, raised_from = self._region.enter(_SNAPSHOT), self._raised_from
                try:
                    yield
                except BaseException:  # its phase stays in the region: it is where the worker failed
                    self._raised_from = before if raised_from is None else raised_from
                    raise
                self._region.enter(before)
                self._raised_from = raised_from  # a save in a `finally` does not tell that anything was caught
        finally:
            self._writers -= 1
        self._unfinished = self._writers > 0

    def reading(self, next_batch: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The `__next__` of DataLoader's iterators, as a phase."""

        def __next__(loader: Any) -> Any:  # noqa: N807 - it takes the place of one
            in_training = threading.get_ident() == self._thread
            self._stop.before_batch(loader, in_training=in_training)
            if not self._infers() or not (self._beating or self._region.phase):
                return next_batch(loader)
            if self._first_data_t is None:
                self._first_data_t = clock.now()
            before = self._region.enter(_DATA)
            if self._raised_from is not None:
                before = self._raised_from
            if self.watcher is not None and before != _START:
                self.watcher("data", 0)
            try:
                batch = next_batch(loader)
            except StopIteration:  # the end of the data is no failure
                self._raised_from = None
                self._region.enter(before)
                raise
            except BaseException:  # its phase stays in the region: it is where the worker failed
                self._raised_from = before
                raise
            self._raised_from = None
            self._region.enter(before)
            if self.watcher is not None and before != _START:
                self.watcher("step", 0)
            return batch

        return __next__

    def _infers(self) -> bool:
        """Whether phases are inferred where this thread is now. That of an evaluation stays, whatever is read and saved in it."""
        phase = self._region.phase
        if phase & TOLD or phase == _EVAL or threading.get_ident() != self._thread:
            return False
        return phase != _START or self._phases

    def go_on(self) -> None:
        """The script has gone on: what was raised while it read or saved, it has caught."""
        if self._raised_from is not None:
            self._region.enter(self._raised_from)
            self._raised_from = None


def _states(optimizer: Any) -> list[dict[str, Any]]:
    """Those of an optimizer's first parameters."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]][:STATES_READ]
    states = [optimizer.state[each] for each in parameters if each in optimizer.state]
    return [each for each in states if isinstance(each, dict)]


def _left_out(optimizer: Any) -> bool:
    """Whether a fused optimizer has kept the weights as they were, as a gradient scaler has it do. Waits for the device."""
    found_inf = getattr(optimizer, "found_inf", None)
    return found_inf is not None and bool(found_inf)


def _makes_state_only() -> bool:
    """Whether the present step of an optimizer trains nothing: `torch.distributed.checkpoint` takes one, with zeros for gradients,
    so that there is a state to load into."""
    frame = sys._getframe(1)
    for _ in range(FRAMES):
        if frame.f_back is None:
            return False
        frame = frame.f_back
        if frame.f_code.co_name == "_init_optim_state":
            return True
    return False


def observe(
    region: WorkerRegion, *, rank: int, on_stop: OnStop, saved_step: int | None = None, drain_s: float | None = None
) -> Progress | None:
    """Watch this process from now on; None if torch is not imported, so that there is nothing to watch yet.

    Args:
        saved_step: after which the script wrote its newest checkpoint by itself.
        drain_s: what a stop on request may take, until workers are killed.
    """
    optimizer, loader = sys.modules.get("torch.optim.optimizer"), sys.modules.get("torch.utils.data.dataloader")
    if optimizer is None:
        return None
    progress = Progress(region, first_rank=rank == 0, on_stop=on_stop, saved_step=saved_step, drain_s=drain_s)
    os.register_at_fork(after_in_child=progress._silence)
    if saved_step is not None:
        progress.first_step = optimizer.register_optimizer_step_pre_hook(progress.before_first_step)
        optimizer.Optimizer.load_state_dict = progress.loading(optimizer.Optimizer.load_state_dict)
    optimizer.register_optimizer_step_post_hook(progress.after_step)
    if loader is not None:
        iterator = loader._BaseDataLoaderIter
        iterator.__next__ = progress.reading(iterator.__next__)
    progress.files.wrap()
    collectives.watch(region, progress.is_silent)
    spawned.watch()
    return progress
