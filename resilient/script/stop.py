"""How a script that says nothing is stopped: between two iterations of its loop, the same two on all ranks.

Owns where a stop may be learned of, which is with the last step of the usual iteration (`resilient.script.iterations`), and where
the script is left then: at the first thing of the next iteration that is noticed. Never right after the optimizer's step: what is
saved in a `finally` then would have the weights of one step, and the counter and learning rate of the one before. Nor before all
optimizers of an iteration have stepped. Where nobody knows what is usual, as in the first steps, the next iteration begins with the
next batch, or when an optimizer steps again.

A validation after the last step is finished, if it does not take too long.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, Literal

from resilient import clock
from resilient.lifeline import pass_over
from resilient.script.iterations import Iterations, Standing

VALIDATION_S = 8.0  # a validation after the last step may go on for so long
VALIDATION_PART = 0.32  # and for no more than this part of what a stop may take: what is saved in a `finally` takes time, too

OnStop = Literal["raise", "signal", "callback"]


class Stopped(SystemExit):
    """Raised in a script that is to stop, between two iterations: `finally` and `atexit` run, and it ends with status 0."""


class ScriptStop:
    """One per rank; everything happens in the thread that trains.

    Args:
        drain_s: what a stop on request may take, until workers are killed.

    Attributes:
        handles: of the hooks that are set while the script is to stop.
        is_off: the script asks by itself whether it is to stop.
    """

    def __init__(self, on_stop: OnStop, drain_s: float | None = None) -> None:
        self.handles: list[Any] = []
        self.is_off = False
        self._on_stop = on_stop
        self._validation_s = VALIDATION_S if drain_s is None else min(VALIDATION_S, VALIDATION_PART * drain_s)
        self._iterations = Iterations()
        self._read_from: int | None = None  # the data set of the last batch, by id
        self._trained_on: set[int] = set()  # data sets whose batches steps have followed
        self._is_complete = False  # the usual iteration was, when the stop was learned of
        self._thread: int | None = None
        self._began_t = 0.0
        self._seen = 0  # calls and batches of a validation since then
        self._look_at = 1  # of them, the one at which to look at the clock

    def stepped(self, optimizer: int, *, counts: bool) -> bool:
        """An optimizer, by its id, has stepped; whether a stop may be learned of here.

        Args:
            counts: it is the first step of those that are counted as one.
        """
        if self._read_from is not None:
            self._trained_on.add(self._read_from)
        standing = self._iterations.step(optimizer)
        if not self._thread:
            self._is_complete = standing is Standing.COMPLETE
        return standing is Standing.COMPLETE or (counts and standing is Standing.UNKNOWN)

    def begin(self, steps_again: Callable[[int], bool], is_next: Callable[[], bool]) -> None:
        """All ranks are to stop after this iteration.

        Args:
            steps_again: whether an optimizer, by its id, has stepped in the present count.
            is_next: whether the present step of an optimizer trains.
        """
        if self._thread is not None or self.is_off:
            return
        self._thread, self._began_t = threading.get_ident(), clock.now()
        if self._on_stop == "callback":
            return
        handler = signal.getsignal(signal.SIGTERM)
        if self._on_stop == "signal" and callable(handler) and handler is not pass_over:
            os.kill(os.getpid(), signal.SIGTERM)
            return

        is_compiling = sys.modules["torch"].compiler.is_compiling

        def before_forward(module: Any, _args: Any = None) -> None:
            if not is_compiling():  # what is compiled once is called on, without the hooks: they must not be part of it
                self._before_forward(module)

        def before_step(optimizer: Any, _args: Any = None, _kwargs: Any = None) -> None:
            if (self._is_complete or (steps_again(id(optimizer)) and not self._iterations.awaits_batch)) and is_next():
                self._leave()

        optimizer, module = sys.modules["torch.optim.optimizer"], sys.modules["torch.nn.modules.module"]
        self.handles = [
            module.register_module_forward_pre_hook(before_forward),
            optimizer.register_optimizer_step_pre_hook(before_step),
        ]

    def before_batch(self, loader: Any, *, in_training: bool) -> None:
        """A batch is about to be read, of the next iteration or of a validation.

        Args:
            in_training: in the thread that trains.
        """
        data, trains = id(getattr(loader, "_dataset", loader)), sys.modules["torch"].is_grad_enabled()
        if self.handles and ((trains and data in self._trained_on) or self._validates_too_long()):
            self._leave()
        if trains and in_training:
            self._read_from = data
            self._iterations.read()

    def _before_forward(self, module: Any) -> None:
        """A module is about to be called, in the next iteration or a validation, or in the present one, unless that is complete."""
        if self._is_complete and ((module.training and sys.modules["torch"].is_grad_enabled()) or self._validates_too_long()):
            self._leave()

    def _validates_too_long(self) -> bool:
        """Looked at seldom: ranks that validate together, with collectives, are to find the same at the same batch."""
        self._seen += 1
        if self._seen < self._look_at:
            return False
        self._look_at = self._seen + max(1, self._seen // 4)
        return clock.now() - self._began_t > self._validation_s

    def _leave(self) -> None:
        if self.handles and not self.is_off and threading.get_ident() == self._thread:
            raise Stopped(0)
