"""An injector as its sender sees it: a process that answers, and that ends when it is let go of."""

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from chaos.injectors.injector import TRIGGER, InjectionRequest
from resilient.imports import shadowing


class InjectorProcess:
    """One request under way.

    Args:
        within: what stands before the command, so that it runs on the right host.
        environ: added to this process's.
        log: what it prints besides its answers is added here.
    """

    def __init__(self, request: InjectionRequest, within: Sequence[str], environ: Mapping[str, str], log: Path) -> None:
        self.request = request
        with log.open("a") as errors:
            self._process = subprocess.Popen(
                [*within, *shadowing.running("chaos.injectors.injector")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, **environ},
                start_new_session=True,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        os.set_blocking(self._out.fileno(), False)
        self._rest = b""
        self._write(request.line().encode())

    def answers(self) -> list[dict[str, Any]]:
        """What it has said since the last call."""
        with suppress(BlockingIOError):
            while chunk := os.read(self._out.fileno(), 1 << 16):
                self._rest += chunk
        *whole, self._rest = self._rest.split(b"\n")
        return [json.loads(line) for line in whole if line.startswith(b"{")]

    def ended(self) -> int | None:
        """Its exit code; None while it runs."""
        return self._process.poll()

    def trigger(self) -> None:
        """Now."""
        self._write(TRIGGER)

    def let_go(self) -> None:
        """It undoes what it has done, and ends."""
        with suppress(BrokenPipeError):
            self._in.close()

    def close(self) -> None:
        """Once it has ended."""
        self.let_go()
        self._out.close()

    def _write(self, what: bytes) -> None:
        with suppress(BrokenPipeError):
            self._in.write(what)
            self._in.flush()
