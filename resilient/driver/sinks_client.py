"""The driver's end of the process of the sinks: starts it, tells it every second that it gets on, starts it anew if it dies.

Nothing here waits for it, but for a few seconds at the driver's end.
"""

import asyncio
import logging
import os
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from shlex import quote

import msgspec

from resilient import clock
from resilient.config import Config
from resilient.imports import shadowing
from resilient.sinks.settings import LOG, Settings

log = logging.getLogger(__name__)

PULSE_S = 1.0
POLL_S = 0.02
PAUSE_S = (2.0, 300.0)  # before it is started anew: at first, and at most


def unsent(run_dir: Path) -> str:
    """The last words of a job whose sinks have not taken all."""
    command = f"`resilient sinks {quote(str(run_dir))}`"
    return f"sinks have not taken all: {run_dir / LOG} says why; the next job sends the rest, or {command}"


class SinksClient:
    """Belongs to the event loop. Without sinks in the config there is no process."""

    def __init__(self, config: Config) -> None:
        self._run_dir = config.run_dir
        self._settings = Settings(config.name, str(config.run_dir), clock.now(), config.logging.sinks.wanted)
        self._process: subprocess.Popen[bytes] | None = None
        self._keeping: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start it; returns at once."""
        if self._settings.sinks:
            self._keeping = asyncio.create_task(self._keep())

    async def _keep(self) -> None:
        pause_s, most_s = PAUSE_S
        while True:
            try:
                self._process = self._spawn()
            except OSError as error:  # no process or no memory is to be had
                log.warning("the process of the sinks cannot be started: %s", error)
            else:
                while self._process.poll() is None:
                    self._pulse()
                    await asyncio.sleep(PULSE_S)
                log.warning("the process of the sinks has died (%s); %s", self._process.returncode, self._run_dir / LOG)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, most_s)

    def _spawn(self) -> subprocess.Popen[bytes]:
        settings = os.memfd_create("sinks")  # not for others to see, as an argument is
        try:
            os.write(settings, msgspec.json.encode(self._settings))
            os.lseek(settings, 0, os.SEEK_SET)
            process = subprocess.Popen(
                [*shadowing.running("resilient.sinks.process"), str(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(settings,),
                env={**os.environ, **clock.environment()},
                start_new_session=True,  # signals to the terminal's processes are the driver's alone
            )
        finally:
            os.close(settings)
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)
        return process

    def _pulse(self) -> None:
        assert self._process is not None and self._process.stdin is not None
        with suppress(OSError):  # it does not read, or has died
            os.write(self._process.stdin.fileno(), b".")

    async def close(self, patience_s: float) -> bool:
        """Let it go once it has sent all, or after this time: then it ends by itself, a few seconds later. Whether all was sent."""
        if self._keeping is None:
            return True
        self._keeping.cancel()
        await asyncio.gather(self._keeping, return_exceptions=True)
        if self._process is None or self._process.stdin is None:
            return False
        self._process.stdin.close()
        deadline = time.monotonic() + patience_s
        while self._process.poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)
        return self._process.poll() == 0
