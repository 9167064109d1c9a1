"""Injectors for campaigns: a fault is done by a process of its own, as the command sends it, and what it answers is read."""

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from campaigns import ROOT, Campaign

from chaos.injectors.context import Target
from chaos.injectors.injector import InjectionRequest
from chaos.injectors.moments import Moment

ANSWER_S = 120.0


class Injector:
    """One request under way. `within`: a command that runs the command that follows it, as for a lab's host."""

    def __init__(self, request: InjectionRequest, within: Sequence[str] = ()) -> None:
        self.request = request
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.process = subprocess.Popen(
            [*within, sys.executable, "-m", "chaos.injectors.injector"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            text=True,
            start_new_session=True,
        )
        assert self.process.stdin is not None
        self.process.stdin.write(request.line())
        self.process.stdin.flush()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._answers.put(line)
        self._answers.put("")

    def answer(self, what: str, patience_s: float = ANSWER_S) -> dict[str, Any]:
        """Its next answer but `armed`, which must be this one."""
        try:
            while line := self._answers.get(timeout=patience_s):
                told: dict[str, Any] = json.loads(line)
                if told["what"] in (what, "failed"):
                    break
            else:
                assert self.process.stderr is not None
                pytest.fail(f"{self.request.fault}: the injector ended before it said {what}: {self.process.stderr.read()}")
        except queue.Empty:
            pytest.fail(f"{self.request.fault}: the injector did not say {what} within {patience_s:.0f} s")
        assert told["what"] == what, told
        return told

    def over(self) -> None:
        """Ask for the end of the fault."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()

    def kill(self) -> None:
        """kill -9, so that its guard must undo what it has done."""
        self.process.kill()
        self.process.wait()

    def done(self) -> dict[str, Any]:
        """What showed that the fault had happened; returns when it is undone."""
        told = self.answer("injected")
        self.answer("undone")
        assert self.process.wait(ANSWER_S) == 0
        return told["evidence"] | {"t": told["t"]}


def request(run: Campaign | Path, fault: str, **fields: Any) -> InjectionRequest:
    """Fields: of the request; `rank`, `node`, `host`: its target; `step`, `phase`: its moment; all else are parameters."""
    target = Target(**{name: fields.pop(name) for name in ("rank", "node", "host") if name in fields})
    moment = Moment(**{name: fields.pop(name) for name in ("step", "phase") if name in fields})
    known = {name: fields.pop(name) for name in ("id", "limit_s", "lab") if name in fields}
    run_dir = run if isinstance(run, Path) else run.run_dir
    return InjectionRequest(**{"id": fault, **known}, fault=fault, run_dir=run_dir, target=target, moment=moment, params=fields)


@contextlib.contextmanager
def injector(run: Campaign | Path, fault: str, *, within: Sequence[str] = (), **fields: Any) -> Iterator[Injector]:
    """Send one; it is gone at the end. Fields as those of `request`."""
    sent = Injector(request(run, fault, **fields), within)
    try:
        yield sent
    finally:
        sent.over()
        if sent.process.poll() is None:
            try:
                sent.process.wait(ANSWER_S)
            except subprocess.TimeoutExpired:
                sent.kill()


def strike(run: Campaign | Path, fault: str, **fields: Any) -> dict[str, Any]:
    """Do a fault and undo it; what showed that it had happened."""
    with injector(run, fault, **fields) as sent:
        return sent.done()
