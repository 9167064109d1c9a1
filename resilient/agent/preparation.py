"""What the entry point wants done once per job, before any rank starts: the function `prepare(config, progress)` of its module,
where it has one. Files that it returns belong to the identity of the campaign.

`run` is the process that calls it, forked where the module is imported already; it sends its progress and its result over a pipe,
as the messages that the agent passes on to the driver. `Preparation` is the agent's end.
"""

import gc
import os
import sys
import time
import traceback
from collections.abc import Callable, Container
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

from resilient import entry
from resilient.agent.bootstrap import shield
from resilient.agent.forkserver import ForkServer
from resilient.agent.limits import PREPARATION_STATUS_S
from resilient.lifeline import flush_streams, name_process
from resilient.protocol.messages import PreparationEnded, PreparationProgress

PROGRESS_S = 0.1  # between two reports of it

News = PreparationProgress | PreparationEnded


def run(outcome: Connection, config: Path, entrypoint: str, log: Path) -> NoReturn:
    """In the forked process, which ends with the one that it was forked from: call the hook.

    It sends `PreparationProgress`, and at the end `PreparationEnded`; the agent puts its generation in.

    Args:
        outcome: where to.
        config: the resolved config's file.
        log: gets what the hook prints.
    """
    shield()
    name_process("prepare")
    gc.enable()  # off while the template imports
    fd = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
    for each in (1, 2):
        os.dup2(fd, each)
    os.close(fd)
    outcome.send(_call(outcome, config, entrypoint))
    flush_streams()
    os._exit(0)


def _call(outcome: Connection, config: Path, entrypoint: str) -> PreparationEnded:
    module, problem = entry.find(entry.parse(entrypoint), trace=sys.stderr)
    if problem is not None:
        return PreparationEnded(generation=0, problems=(("entrypoint", entrypoint, problem),))
    hook = getattr(module, "prepare", None)
    if hook is None:
        return PreparationEnded(generation=0)
    from resilient.config import ConfigError, load
    from resilient.exits import EnvironmentUnusable
    from resilient.identity import record

    try:
        loaded = load(config)
        made = hook(loaded, _progress(outcome))
        if isinstance(made, list | tuple):
            try:
                problems = record.note_prepared(loaded.run_dir, [Path(each) for each in made])
            except OSError as error:
                raise EnvironmentUnusable(f"cannot write {error.filename or loaded.run_dir}: {error.strerror}") from error
            if problems:
                raise ConfigError(problems)
    except ConfigError as error:
        return PreparationEnded(generation=0, problems=tuple((p.key, _plain(p.value), p.message) for p in error.problems))
    except EnvironmentUnusable as error:
        return PreparationEnded(generation=0, failure=str(error), code=int(error.code))
    except Exception:  # noqa: BLE001 - whatever it is, it is reported to the driver, which ends the run
        return PreparationEnded(generation=0, failure=traceback.format_exc().encode(errors="replace").decode())
    return PreparationEnded(generation=0)


def _plain(value: object) -> object:
    """A value that JSON has."""
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _progress(outcome: Connection) -> Callable[[str, int, int], None]:
    sent_t, sent = 0.0, ""

    def progress(what: str, done: int, total: int) -> None:
        nonlocal sent_t, sent
        now = time.monotonic()
        if what != sent or now >= sent_t + PROGRESS_S:
            sent_t, sent = now, what
            outcome.send(PreparationProgress(generation=0, what=what, done=int(done), total=int(total)))

    return progress


def log_of(run_dir: Path) -> Path:
    """What the hook prints, of all its attempts."""
    return run_dir / "logs" / "prepare.log"


class Preparation:
    """A preparation as its agent sees it. Nothing here waits.

    Args:
        outcome: what its process writes to.
        status: its exit status, once it has ended and that is known; None before.
        entrypoint, log: for the message.

    Attributes:
        over: nothing more will come.
    """

    def __init__(self, outcome: Connection, status: Callable[[], int | None], entrypoint: str, log: Path) -> None:
        self._outcome, self._status = outcome, status
        self._entrypoint, self._log = entrypoint, log
        self._closed_t: float | None = None
        self.over = False

    def readable(self) -> list[int]:
        """Descriptors that are readable when there is something to receive; none once its process has closed the pipe."""
        return [] if self._outcome.closed else [self._outcome.fileno()]

    def due(self, ready: Container[object]) -> bool:
        """Whether `receive` may have something. Args: ready: descriptors that are readable."""
        return self._closed_t is not None or any(each in ready for each in self.readable())

    def receive(self) -> News | None:
        """The next message; after the last one this is over. None: nothing has come, or its process has ended and its status is not
        known yet, since the template reaps nothing while it imports; call this again."""
        if self._closed_t is None:
            try:
                if not self._outcome.poll():
                    return None
                news: News = self._outcome.recv()
            except (EOFError, OSError):
                self._closed_t = time.monotonic()
                self._outcome.close()
            else:
                self.over = isinstance(news, PreparationEnded)
                return news
        status = self._status()
        if status is None and time.monotonic() < self._closed_t + PREPARATION_STATUS_S:
            return None
        how = "ended before it had come to a result" if status is None else f"ended with exit code {status}"
        self.over = True
        failure = f"the preparation of {self._entrypoint} {how}; its output is in {self._log}"
        return PreparationEnded(generation=0, failure=failure, killed=status is None or status < 0)

    def close(self) -> None:
        """Let go of it; a process that still runs ends with the agent."""
        self._outcome.close()


class Preparations:
    """The preparation of this node, if it is made here: at first where the template forks it, later where the driver asks for it.

    Args:
        fork_server: forks it.
        config, entrypoint, log: what it is called with.
        send: passes its news on.
        outcome: what the one writes to that the template forks, where it does.
    """

    def __init__(
        self,
        fork_server: ForkServer,
        *,
        config: Path,
        entrypoint: str,
        log: Path,
        send: Callable[[News], None],
        outcome: Connection | None,
    ) -> None:
        self._fork_server, self._send = fork_server, send
        self._config, self._entrypoint, self._log = config, entrypoint, log
        self._wanted = False
        self._running: Preparation | None = None
        if outcome is not None:
            self._running = Preparation(outcome, lambda: fork_server.prepared, entrypoint, log)

    def want(self) -> None:
        """The node or the process that was at it is gone: it is made here, as soon as there is a fork server."""
        self._wanted = True

    def readable(self) -> list[int]:
        """See `Preparation.readable`."""
        return self._running.readable() if self._running is not None else []

    def step(self, ready: Container[object]) -> None:
        """Pass on what has come, start what is wanted. Args: ready: descriptors that are readable."""
        if self._running is not None and self._running.due(ready):
            if (news := self._running.receive()) is not None:
                self._send(news)
            if self._running.over:
                self.close()
        if self._wanted and self._fork_server.ready:
            self._wanted = False
            self._start()

    def _start(self) -> None:
        ours, its = self._fork_server.Pipe()
        args = (its, self._config, self._entrypoint, self._log)
        process = self._fork_server.Process(target=run, args=args, name="prepare")
        process.start()
        its.close()
        self._running = Preparation(ours, lambda: process.exitcode, self._entrypoint, self._log)

    def close(self) -> None:
        """See `Preparation.close`."""
        if self._running is not None:
            self._running.close()
            self._running = None
