"""The driver's end of its disk process: starts it, talks to it, starts it anew if it dies.

Nothing here waits: what is sent is buffered, what comes back is passed on, and the process's end is not waited for.
"""

import asyncio
import logging
import socket
import subprocess
from collections.abc import Callable
from contextlib import suppress
from itertools import count

from checkpoint.framing import Decoder, Message, encode
from resilient.imports import shadowing
from resilient.protocol.disk import Answer, Call, DiskNews, DiskSettings

log = logging.getLogger(__name__)

RESTART_S = 1.0
NOT_ANSWERED = "the run directory does not answer"
DIED = "the disk process has died"


def report(task: asyncio.Task[None], defect: Callable[[BaseException], None]) -> None:
    """Tell of the error that a task has ended with, if it has."""
    if not task.cancelled() and (error := task.exception()) is not None:
        defect(error)


class DiskClient:
    """Invariant: a call is in `_calls` until it is answered, given up, or its process has died.

    Args:
        settings: of the disk process.
        hear: gets its news, except answers.
        started: called whenever a process was started; what an earlier one had not written is to be sent again.
        defect: called with an error that nobody has thought of.
    """

    def __init__(
        self,
        settings: DiskSettings,
        hear: Callable[[DiskNews], None],
        started: Callable[[], None],
        defect: Callable[[BaseException], None],
    ) -> None:
        self._settings = settings
        self._hear = hear
        self._started = started
        self._defect = defect
        self._calls: dict[int, asyncio.Future[Answer]] = {}
        self._numbers = count(1)
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._serving: asyncio.Task[None] | None = None
        self._connected = asyncio.Event()

    def start(self) -> None:
        """Start it; returns at once."""
        self._serving = asyncio.create_task(self._serve())
        self._serving.add_done_callback(lambda task: report(task, self._defect))

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def _serve(self) -> None:
        while True:
            here, there = socket.socketpair()
            try:
                with there:
                    self._process = self._spawn(there)
            except OSError as error:  # no process or no memory is to be had
                log.error("the disk process cannot be started: %s", error)
                here.close()
                await asyncio.sleep(RESTART_S)
                continue
            reader, self._writer = await asyncio.open_connection(sock=here)
            complaints = asyncio.create_task(self._pass_on_complaints(self._process))
            self.send(self._settings)
            self._connected.set()
            self._started()
            await self._receive(reader)
            self._connected.clear()
            self._writer.close()
            self._writer = None
            await complaints
            for call in [each for each in self._calls.values() if not each.done()]:
                call.set_result(Answer(call=0, error=DIED))
            log.error("the disk process (pid %d) has died; another one goes on", self._process.pid)
            self._process.poll()
            await asyncio.sleep(RESTART_S)

    def _spawn(self, connection: socket.socket) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [*shadowing.running("resilient.driver.disk"), str(connection.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=(connection.fileno(), self._settings.lock_fd),
            start_new_session=True,  # signals to the terminal's processes are the driver's alone
        )

    async def _receive(self, reader: asyncio.StreamReader) -> None:
        decoder: Decoder[DiskNews] = Decoder(DiskNews)
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                for news in decoder.feed(data):
                    if isinstance(news, Answer):
                        future = self._calls.pop(news.call, None)
                        if future is not None and not future.done():
                            future.set_result(news)
                    else:
                        self._hear(news)

    async def _pass_on_complaints(self, process: subprocess.Popen[bytes]) -> None:
        """What it prints on its standard error, as lines of this process's log."""
        assert process.stderr is not None
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), process.stderr
        )
        try:
            async for line in reader:
                log.warning("disk process: %s", line.decode(errors="replace").rstrip())
        finally:
            transport.close()

    @property
    def connected(self) -> bool:
        """Whether there is a process that is listened to."""
        return self._writer is not None

    def send(self, message: Message) -> bool:
        """Returns whether there is a process that it is sent to."""
        if self._writer is None:
            return False
        self._writer.write(encode(message))
        return True

    async def call(self, make: Callable[[int], Call], timeout_s: float, *, again: bool = False) -> Answer:
        """Ask for something; a call that is not answered in time has failed, whatever comes of it.

        Args:
            make: the call, from its number.
            again: it may be done twice: where the process dies, the next one is asked, once: it may be the call that it died of.
        """
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._asked(make)
                return await self._asked(make) if again and answer.error == DIED else answer
        except TimeoutError:
            return Answer(call=0, error=f"no answer for {timeout_s:g} s")

    async def _asked(self, make: Callable[[int], Call]) -> Answer:
        number = next(self._numbers)
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._calls[number] = future
        try:
            await self._connected.wait()
            self.send(make(number))
            return await future
        finally:
            self._calls.pop(number, None)

    async def close(self) -> None:
        """Let it go: it ends by itself, once the connection is closed and as soon as the kernel lets it."""
        if self._serving is not None:
            self._serving.cancel()
            with suppress(asyncio.CancelledError):
                await self._serving
        if self._writer is not None:
            self._writer.close()
            with suppress(OSError, asyncio.TimeoutError):
                await asyncio.wait_for(self._writer.wait_closed(), 1.0)
        if self._process is not None:
            self._process.poll()
