"""What Slurm's commands are asked and told: its queue, one job, the site's KillWait; sbatch and scancel.

Owns the text of the commands and of their answers. Every call has a time limit and raises `SlurmSilent` when it comes to nothing;
who calls decides whether to try again.
"""

import contextlib
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from resilient.slurm.answer import answer
from resilient.slurm.hosts import expand, lists
from resilient.slurm.options import in_script, overriding

ASK_S = 10.0
ARGUMENT_BYTES = 120_000  # the kernel starts no command with one of more than 131,071
FIELDS = "JobID:32,State:24,EndTime:24,PreemptTime:24,StartTime:24,Reason:48"  # each wider than anything that stands in it

# States in which a job still holds its nodes and may use them.
ALIVE = frozenset({"RUNNING", "CONFIGURING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT"})
HALTED = frozenset({"SUSPENDED", "STOPPED"})  # those of them in which its processes stand still
WAITING = frozenset({"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"})
ENDED = frozenset(
    {"COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "DEADLINE", "BOOT_FAIL", "REVOKED"}
)  # as squeue calls jobs that are over
HELD = frozenset({"REQUEUE_HOLD", "SPECIAL_EXIT"})
UNSTARTABLE = "BadConstraints"  # the reason of a job that Slurm does not try again before it is updated
BUSY = ("Unable to contact", "timed out", "Connection", "Zero Bytes", "temporarily", "try again", "Transport", "communication")
UNCONFIGURED = "Could not establish a configuration source"
_JOB_ID = re.compile(r"\d{1,18}", re.ASCII)
_SUBMITTED = re.compile(r"(\d{1,18})(;.*)?", re.ASCII)  # what a site's own sbatch says around it is none
OVER = ("Invalid job id", "already completing or completed", "Job/step already")


class SlurmSilent(Exception):
    """Slurm has not done what was asked: it does not answer, or refuses."""


class SlurmRefused(SlurmSilent):
    """Slurm has answered that it will not; asked again at once it would say the same."""


class NoSlurm(SlurmRefused):
    """This machine has no Slurm, or one that belongs to no cluster."""


@dataclass(frozen=True)
class QueuedJob:
    """A job as the queue shows it.

    Attributes:
        end_t: when its time is over, unix seconds; None if it has no limit, or does not run.
        preempted: it was told to make room, and `end_t` is the end of its grace time.
        reason: why it waits.
        start_t: when it has begun, or is expected to, unix seconds; None if that is not known.
    """

    job_id: str
    state: str
    end_t: float | None = None
    preempted: bool = False
    reason: str = ""
    start_t: float | None = None

    @property
    def waits(self) -> bool:
        return self.state in WAITING

    @property
    def held(self) -> bool:
        """Whether it waits until somebody releases it."""
        return self.waits and (self.state in HELD or "held" in self.reason.lower())

    @property
    def stuck(self) -> bool:
        """Whether it can get no nodes as it is, such as all of a partition without one that it is not to get."""
        return self.waits and self.reason == UNSTARTABLE

    @property
    def runs(self) -> bool:
        return self.state in ALIVE

    @property
    def halted(self) -> bool:
        return self.state in HALTED


@dataclass(frozen=True)
class AllottedJob:
    """What a job has, as `scontrol show job` tells it.

    Attributes:
        hosts: that it has left.
        batch_host: where its batch script was started.
        requeue: it may be put back into the queue.
        restarts: how often it was.
        partition, qos: that it runs in; empty where that is not said.
    """

    state: str
    hosts: tuple[str, ...]
    batch_host: str
    requeue: bool
    restarts: int = 0
    partition: str = ""
    qos: str = ""

    @property
    def runs(self) -> bool:
        return self.state in ALIVE

    @property
    def headless(self) -> bool:
        """Whether it goes on without its batch host."""
        return self.runs and self.batch_host not in self.hosts


def parse_allotted(text: str) -> AllottedJob | None:
    """The answer of `scontrol --oneliner show job`; None if it is none.

    A heterogeneous job has a line for each component, each with a batch host; the batch script runs on that of component 0.
    """
    lines = [dict(word.split("=", 1) for word in line.split() if "=" in word) for line in text.splitlines()]
    found = next((line for line in lines if "JobState" in line and line.get("HetJobOffset", "0") == "0"), {})
    if not {"JobState", "BatchHost", "NodeList"} <= found.keys():
        return None
    try:
        hosts = () if found["NodeList"] == "(null)" else tuple(expand(found["NodeList"]))
    except ValueError:
        return None
    restarts = found.get("Restarts", "0")
    again = int(restarts) if re.fullmatch(r"\d{1,9}", restarts, re.ASCII) else 0
    whose = {"partition": found.get("Partition", ""), "qos": found.get("QOS", "")}
    return AllottedJob(found["JobState"], hosts, found["BatchHost"], found.get("Requeue") == "1", again, **whose)


def parse_queue(text: str) -> list[QueuedJob]:
    """The jobs in the answer of `squeue --Format` with FIELDS, oldest first; lines that are none are skipped."""
    found = []
    for line in text.splitlines():
        words = line.split(maxsplit=5)
        if len(words) >= 5 and _JOB_ID.fullmatch(words[0]):
            end_t, preempt_t, start_t = map(parse_time, words[2:5])
            reason = words[5].strip() if words[5:] else ""
            found.append(QueuedJob(words[0], words[1], end_t, preempt_t is not None, reason, start_t))
    return sorted(found, key=lambda job: int(job.job_id))


def parse_time(word: str) -> float | None:
    """Unix seconds of a time that Slurm prints in this machine's local time; None for N/A, NONE, Unknown."""
    with contextlib.suppress(ValueError, OverflowError, OSError):
        return datetime.fromisoformat(word).timestamp()
    return None


def parse_nodes(text: str) -> dict[str, frozenset[str]]:
    """By node, its state and the flags of it in the answer of `scontrol --oneliner show node`; other lines are skipped."""
    found = {}
    for line in text.splitlines():
        name, state = re.match(r"NodeName=(\S+)", line), re.search(r"\sState=(\S+)", line)
        if name is not None and state is not None:
            found[name[1]] = frozenset(word.rstrip("*~#!%$@^-") for word in state[1].split("+"))
            if "*" in state[1]:  # as versions before 20.11 write it
                found[name[1]] |= {"NOT_RESPONDING"}
    return found


def parse_kill_wait(text: str) -> float | None:
    """Seconds from SIGTERM to SIGKILL, of the answer of `scontrol show config`."""
    found = re.search(r"^KillWait\s*=\s*(\d{1,9})\b", text, re.MULTILINE)
    return float(found[1]) if found else None


def _setting(config: str, name: str) -> str:
    """The value of a name in the answer of `scontrol show config`; empty where it has none."""
    found = re.search(rf"^{name}[ \t]*=[ \t]*(\S+)", config, re.MULTILINE)
    return found[1] if found else ""


def environment(environ: Mapping[str, str], without: Collection[str] = ()) -> dict[str, str]:
    """What a new job and Slurm's commands should inherit: not what Slurm has told this one of itself, nor a person's filters.

    Args:
        without: more variables that they should not.
    """
    dropped = ("SLURM_", "SRUN_", "SQUEUE_", "SCANCEL_")
    kept = {name: value for name, value in environ.items() if not name.startswith(dropped) or name == "SLURM_CONF"}
    return {name: value for name, value in kept.items() if name not in without}


async def _call(command: Sequence[str], timeout_s: float = ASK_S, *, without: Collection[str] = ()) -> str:
    try:
        said = await answer(command, environment(os.environ, without), timeout_s)
    except TimeoutError:
        raise SlurmSilent(f"{command[0]} has not answered for {timeout_s:g} s") from None
    except FileNotFoundError:
        raise NoSlurm(f"Slurm is not to be had on this machine: there is no {command[0]} on its PATH") from None
    except OSError as error:
        raise SlurmRefused(f"{command[0]} cannot be started: {error.strerror}") from error
    if said.code:
        lines = [line.strip() for line in said.complaint.splitlines() if line.strip()]
        why = "; ".join(lines) or f"exit code {said.code}"
        refused = not any(words in why for words in BUSY)
        if refused and lines and UNCONFIGURED in lines[-1]:  # and not because the controller, which has it, is silent
            raise NoSlurm(f"Slurm on this machine is of no cluster: {lines[-1]}")
        raise (SlurmRefused if refused else SlurmSilent)(why if why.startswith(command[0]) else f"{command[0]}: {why}")
    return said.output


async def job(job_id: str, *, timeout_s: float = ASK_S) -> QueuedJob | None:
    """One job; None if Slurm does not know it any more. Raises SlurmSilent."""
    try:
        output = await _call(["squeue", "--noheader", "--states", "all", "--jobs", job_id, "--Format", FIELDS], timeout_s)
    except SlurmSilent as error:
        if any(words in str(error) for words in OVER):
            return None
        raise
    return next(iter(parse_queue(output)), None)


async def nodes(job_id: str, *, timeout_s: float = ASK_S) -> set[str]:
    """Names of the nodes that a job has now, of a heterogeneous one those of all components. Raises SlurmSilent."""
    output = await _call(["squeue", "--noheader", "--jobs", job_id, "--format", "%N"], timeout_s)
    try:
        return {name for line in output.split() for name in expand(line)}
    except ValueError as error:
        raise SlurmSilent(str(error)) from error


async def jobs(name: str, also_of: int | None = None) -> list[QueuedJob]:
    """This user's jobs of a name that wait or run, oldest first. Raises SlurmSilent. Args: also_of: another user, by number."""
    whose = ["--me"] if also_of is None else ["--user", f"{also_of},{os.geteuid()}"]
    return parse_queue(await _call(["squeue", "--noheader", *whose, "--name", name, "--Format", FIELDS]))


async def allotted(job_id: str, *, timeout_s: float = ASK_S) -> AllottedJob | None:
    """What a job has; None if Slurm does not know it any more. Raises SlurmSilent."""
    try:
        return parse_allotted(await _call(["scontrol", "--oneliner", "show", "job", job_id], timeout_s))
    except SlurmSilent as error:
        if any(words in str(error) for words in OVER):
            return None
        raise


async def node_states(hosts: Collection[str], *, timeout_s: float = ASK_S) -> dict[str, frozenset[str]]:
    """What Slurm calls each of these nodes, as {"DOWN", "NOT_RESPONDING"}. Raises SlurmSilent. Args: timeout_s: of one command."""
    found: dict[str, frozenset[str]] = {}
    for names in lists(list(hosts), ARGUMENT_BYTES):
        found |= parse_nodes(await _call(["scontrol", "--oneliner", "show", "node", names], timeout_s))
    return found


async def reservations() -> str:
    """What Slurm says of all reservations, one a line. Raises SlurmSilent."""
    return await _call(["scontrol", "--oneliner", "show", "reservation"])


async def kill_wait() -> float | None:
    """The site's KillWait, seconds. Raises SlurmSilent."""
    return parse_kill_wait(await _call(["scontrol", "show", "config"]))


async def cluster() -> str:
    """The name of this machine's cluster; empty where that is not said. Raises SlurmSilent."""
    return _setting(await _call(["scontrol", "show", "config"]), "ClusterName")


async def preempt_mode(job: AllottedJob, *, timeout_s: float = ASK_S) -> str:
    """What Slurm does with a job that it preempts, as {"REQUEUE"}; empty where that is not said. Raises SlurmSilent."""
    config = await _call(["scontrol", "show", "config"], timeout_s)
    command, pattern = [], r"PreemptMode=(\S+)"
    if _setting(config, "PreemptType") == "preempt/partition_prio":
        command = ["scontrol", "--oneliner", "show", "partition", job.partition]
    elif _setting(config, "PreemptType") == "preempt/qos":
        command, pattern = ["sacctmgr", "--noheader", "--parsable2", "show", "qos", job.qos, "format=PreemptMode"], r"^(\S+)$"
    found = re.search(pattern, await _call(command, timeout_s), re.MULTILINE) if command else None
    own = found[1].upper() if found is not None else ""
    return own if own not in ("", "CLUSTER") else _setting(config, "PreemptMode").upper()


async def submit(script: Path, dependencies: Collection[str], without: Collection[str] = ()) -> str:
    """Submit a batch script; the new job's id. No variable of sbatch wins over what the script says. Raises SlurmSilent, OSError.

    Args:
        without: hosts that the job is not to get.
    """
    command = ["--parsable", f"--dependency={','.join(dependencies)}", *_excluding(without), str(script)]
    output = await _sbatch(command, script)
    told = [found for line in output.splitlines() if (found := _SUBMITTED.fullmatch(line.strip())) is not None]
    if not told:
        raise SlurmSilent(f"sbatch has told no job id: {output.strip()!r}")
    return told[-1][1]


async def must_be_startable(script: Path, without: Collection[str]) -> None:
    """Raises SlurmRefused where Slurm has no nodes for a job without these hosts, or not at present; SlurmSilent, OSError.

    It takes such an `exclude` of a job that waits all the same, and never starts the job.
    """
    await _sbatch(["--test-only", *_excluding(without), str(script)], script)


def _excluding(hosts: Collection[str]) -> list[str]:
    return [f"--exclude={','.join(hosts)}"] if hosts else []


async def _sbatch(arguments: Sequence[str], script: Path) -> str:
    return await _call(["sbatch", *arguments], 3 * ASK_S, without=overriding(in_script(script.read_text(errors="replace"))))


async def exclude(job_id: str, hosts: Collection[str]) -> None:
    """A job that waits is to be given none of these hosts, and any other; it is tried again. Raises SlurmSilent."""
    await _call(["scontrol", "update", f"JobId={job_id}", f"ExcNodeList={','.join(hosts)}"])


async def requeue(job_id: str) -> None:
    """End a job, and let it begin again. Raises SlurmSilent."""
    await _call(["scontrol", "requeue", job_id])


async def cancel(job_id: str) -> None:
    """Cancel a job, if it has not ended by itself. Raises SlurmSilent."""
    try:
        await _call(["scancel", job_id])
    except SlurmSilent as error:
        if not any(words in str(error) for words in OVER):
            raise


async def signal_driver(job_id: str, name: str) -> None:
    """Send a signal to the batch script of a job, and to nothing else. Raises SlurmSilent."""
    await _call(["scancel", "--batch", f"--signal={name}", job_id])
