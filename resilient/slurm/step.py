"""One step of the job: an srun with the agents of one node or of many.

Owns the srun process. A task of a step of many may end while the others go on, and srun itself lives until the last one has ended;
so what srun says of its tasks is read, and each node whose task has ended is told once.

Once the agents of a step of many have connected, their connections say how they are, and its srun is held (SIGSTOP) until the end.
For srun ends the whole step, whatever `--no-kill` says, when a node of it is up again before Slurm has called it down: slurmctld
tells it that the step is missing there, and it finds its connection broken ("Aborting, io error and missing step"). Nothing in a
running step needs srun: an agent writes its own log, and what is sent to srun waits in its sockets. An srun that is held ends with
the driver: it is a process group of the driver's session, and the kernel hangs up on groups that are orphaned while they are held.
"""

import asyncio
import logging
import os
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

from checkpoint import descriptors
from resilient.slurm.hosts import expand
from resilient.slurm.queue import BUSY
from resilient.slurm.roster import Seat

log = logging.getLogger(__name__)

GRACE_S = 5.0  # for srun to end its step
KILLED_S = 1.0  # for it to end once it was killed
HOLD_AGAIN_S = 5.0
LAST_WORDS_S = 1.0  # for what srun has said before it ended
_LINE_BYTES = 1 << 20  # of a line of srun

# srun: error: n[2-3]: tasks 1-2: Exited with exit code 1
_TASK = re.compile(r"srun: error: (?P<hosts>\S+): tasks? [\d,-]+: (?P<how>.+)")
# srun: error: Unable to confirm allocation for job 25: Socket timed out on send/recv operation
_NO_STEP = re.compile(r"srun: error: Unable to (?:confirm allocation|create step) for job \S+: (?P<why>.+)")

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


def unanswered(line: str) -> bool:
    """Whether this line of srun says that there is no step, for Slurm has not answered."""
    found = _NO_STEP.match(line)
    return found is not None and any(words in found["why"] for words in BUSY)


def _working_directory() -> str | None:
    """For srun, which does not start in a directory that was deleted; None: this process's."""
    try:
        os.getcwd()  # noqa: PTH109 - whether it is there
    except FileNotFoundError:
        return "/"
    return None


def _become_srun(descriptors_before: int) -> None:
    """In the process that becomes srun: under `nohup` it would ignore hang-ups, and outlive the driver while it is held.

    Args:
        descriptors_before: the limit that the driver was started with; srun would ask for the driver's own on every node.
    """
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    descriptors.limit(descriptors_before)


class Step:
    """A step that was started.

    Invariant: `seats` holds the hosts whose agents have not been told as ended, nor given up; srun is held only while all of them
    have connected.

    Args:
        process: the srun, whose standard error is a pipe.
        seats: by host name.
        ended: called with node, incarnation and a description, once for each host in `seats`.
        again: called once in its place, with all that are left, where Slurm did not answer and there is no step.
        log: what its tasks print goes there, by the name that a person knows.
    """

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        seats: Mapping[str, Seat],
        ended: Callable[[int, int, str], None],
        again: Callable[[Mapping[str, Seat]], None],
        log: str,
    ) -> None:
        self._process = process
        self.seats = dict(seats)
        self._awaited = set(seats) if len(seats) > 1 else None  # hosts without a connection yet; None: it is never held
        self._holder: asyncio.Task[None] | None = None  # while it is held
        self._ended = ended
        self._again = again
        self._unanswered = False
        self._see = f"; see {log}"
        self._reader = asyncio.create_task(self._read())
        self._watcher = asyncio.create_task(self._watch())

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        environ: Mapping[str, str],
        seats: Mapping[str, Seat],
        ended: Callable[[int, int, str], None],
        again: Callable[[Mapping[str, Seat]], None],
        log: str,
    ) -> "Step":
        """Run srun, out of reach of a terminal's signals. Raises OSError if it cannot be started."""
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env=dict(environ),
            cwd=_working_directory(),
            process_group=0,
            preexec_fn=partial(_become_srun, descriptors.at_start()),
            limit=_LINE_BYTES,
        )
        return cls(process, seats, ended, again, log)

    def give_up(self, node: int) -> bool:
        """Tell nothing more of this node; whether it was one of the step."""
        hosts = [host for host, seat in self.seats.items() if seat.node == node]
        for host in hosts:
            del self.seats[host]
            self._await_no_more(host)
        return bool(hosts)

    def connected(self, node: int) -> None:
        """The agent of a node has connected."""
        for host in [host for host, seat in self.seats.items() if seat.node == node]:
            self._await_no_more(host)

    def release(self) -> None:
        """Have srun go on, if it is held; it is not held again."""
        self._awaited = None
        if self._holder is not None:
            self._holder.cancel()
            self._holder = None
            with suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGCONT)

    def _await_no_more(self, host: str) -> None:
        if self._awaited is None:
            return
        self._awaited.discard(host)
        if not self._awaited and self._holder is None and not self.over:
            self._hold()
            self._holder = asyncio.create_task(self._keep_held())

    def _hold(self) -> None:
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGSTOP)

    async def _keep_held(self) -> None:
        """Hold srun again and again: Slurm continues all processes of a job that was suspended."""
        while not self.over:
            await asyncio.sleep(HOLD_AGAIN_S)
            self._hold()

    async def wait(self) -> None:
        """Until srun has ended."""
        await self._process.wait()

    @property
    def over(self) -> bool:
        """Whether srun has ended."""
        return self._process.returncode is not None

    async def end(self) -> None:
        """Have srun end the step, and do not wait longer than `GRACE_S` for it, nor for a site's script in its place.

        What such a script has started keeps the pipe open when the script has ended, and asyncio waits for both.
        """
        if self.over:
            return
        self.release()
        with suppress(ProcessLookupError):
            self._process.terminate()
        try:
            await asyncio.wait_for(self._process.wait(), GRACE_S)
        except TimeoutError:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._gone(), KILLED_S)

    async def _gone(self) -> None:
        """Until srun has ended, and nobody has its pipe any more."""
        await self._process.wait()
        if self._process.stderr is not None and self._reader.done():
            await self._process.stderr.read()

    def close(self) -> None:
        """Tell nothing any more, and let srun see the end of its tasks."""
        self.release()
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
            self._unanswered = self._unanswered or unanswered(line.rstrip())
            found = ends_in(line.rstrip())
            for host in found[0] if found is not None else ():
                seat = self.seats.pop(host, None)
                if seat is not None and found is not None:
                    self._await_no_more(host)
                    self._ended(seat.node, seat.incarnation, f"its task on {host} ended: {found[1]}{self._see}")

    async def _watch(self) -> None:
        code = await self._process.wait()
        await asyncio.wait([self._reader], timeout=LAST_WORDS_S)
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        left, self.seats = self.seats, {}
        if left and self._unanswered:
            self._again(left)
            return
        for host, seat in left.items():
            self._ended(seat.node, seat.incarnation, f"its step on {host} ended by {how}{self._see}")
