"""One step of the job: an srun with the agents of one node or of many.

Owns the srun process. A task of a step of many may end while the others go on, and srun itself lives until the last one has ended;
so what srun says of its tasks is read, and each node whose task has ended is told once.
"""

import asyncio
import logging
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from resilient.slurm.hosts import expand
from resilient.slurm.roster import Seat

log = logging.getLogger(__name__)

GRACE_S = 5.0  # for srun to end its step
LAST_WORDS_S = 1.0  # for what srun has said before it ended
_LINE_BYTES = 1 << 20  # of a line of srun

# srun: error: n[2-3]: tasks 1-2: Exited with exit code 1
_TASK = re.compile(r"srun: error: (?P<hosts>\S+): tasks? [\d,-]+: (?P<how>.+)")
# srun: error: Node failure on n3; srun: error: Task launch for StepId=1.0 failed on node n3: Communication connection failure
_NODE = re.compile(r"srun: error: (?P<how>.*(?:Node failure on|failed on node) (?P<hosts>[^\s:]+).*)")


def ends_in(line: str) -> tuple[list[str], str] | None:
    """The hosts whose tasks have ended, and how, if that is what this line of srun says."""
    found = _TASK.match(line) or _NODE.match(line)
    if found is None:
        return None
    try:
        return expand(found["hosts"].rstrip(",")), found["how"]
    except ValueError:
        return None


class Step:
    """A step that was started.

    Invariant: `seats` holds the hosts whose agents have not been told as ended, nor given up.

    Args:
        process: the srun, whose standard error is a pipe.
        seats: by host name.
        ended: called with node, incarnation and a description, once for each host in `seats`.
    """

    def __init__(
        self, process: asyncio.subprocess.Process, seats: Mapping[str, Seat], ended: Callable[[int, int, str], None]
    ) -> None:
        self._process = process
        self.seats = dict(seats)
        self._ended = ended
        self._reader = asyncio.create_task(self._read())
        self._watcher = asyncio.create_task(self._watch())

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        environ: Mapping[str, str],
        seats: Mapping[str, Seat],
        ended: Callable[[int, int, str], None],
    ) -> "Step":
        """Run srun in a session of its own. Raises OSError if it cannot be started."""
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env=dict(environ),
            start_new_session=True,
            limit=_LINE_BYTES,
        )
        return cls(process, seats, ended)

    def give_up(self, node: int) -> bool:
        """Tell nothing more of this node; whether it was one of the step."""
        hosts = [host for host, seat in self.seats.items() if seat.node == node]
        for host in hosts:
            del self.seats[host]
        return bool(hosts)

    async def wait(self) -> None:
        """Until srun has ended."""
        await self._process.wait()

    @property
    def over(self) -> bool:
        """Whether srun has ended."""
        return self._process.returncode is not None

    async def end(self) -> None:
        """Have srun end the step, and do not wait longer than `GRACE_S` for it."""
        if self.over:
            return
        with suppress(ProcessLookupError):
            self._process.terminate()
        try:
            await asyncio.wait_for(self._process.wait(), GRACE_S)
        except TimeoutError:
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()

    def close(self) -> None:
        """Tell nothing any more."""
        self._reader.cancel()
        self._watcher.cancel()

    async def _read(self) -> None:
        assert self._process.stderr is not None
        while True:
            try:
                line = (await self._process.stderr.readline()).decode(errors="replace")
            except ValueError:
                continue  # longer than any line of srun; it was dropped
            if not line:
                return
            log.warning("%s", line.rstrip())
            found = ends_in(line.rstrip())
            for host in found[0] if found is not None else ():
                seat = self.seats.pop(host, None)
                if seat is not None and found is not None:
                    self._ended(seat.node, seat.incarnation, f"its task on {host} ended: {found[1]}")

    async def _watch(self) -> None:
        code = await self._process.wait()
        await asyncio.wait([self._reader], timeout=LAST_WORDS_S)
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        left, self.seats = self.seats, {}
        for host, seat in left.items():
            self._ended(seat.node, seat.incarnation, f"its step on {host} ended by {how}")
