"""What an agent has checked before its node takes part: what keeps a node from holding ranks, and takes little time.

The tasks run in processes that the agent's fork server forks, so that torch is there already; the agent goes on meanwhile.
`settle` says what keeps the node out, and is pure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from resilient import storage
from resilient.health import compute, disk, gpus, machine
from resilient.health.bounded import Context, Examination, Task
from resilient.health.report import Finding, Report
from resilient.recovery.xids import Xid


@dataclass(frozen=True)
class NodeSpec:
    """What is checked on one node.

    Attributes:
        devices: of the ranks that it is to hold, by number.
        world: ranks of all nodes.
        device: "cpu" or "cuda".
        addr: at which the other nodes reach it.
        tiers: where its checkpoints go.
        meeting: a file in an existing directory in RAM, where its processes find each other.
        limit_s: for everything.
        stuck: processes that were killed and have not ended.
        gpu_faults: that the GPUs' driver has reported since the check before.
        gpus: of the local ranks, as addresses on the PCI bus.
        rdma_ports: InfiniBand and RoCE ports in use, which pin memory.
        visible: CUDA_VISIBLE_DEVICES of the ranks; None: as it is.
    """

    devices: tuple[int, ...]
    world: int
    device: str
    addr: str
    tiers: tuple[disk.TierSpec, ...]
    meeting: Path
    limit_s: float
    rdma_ports: tuple[str, ...] = ()
    gpu_faults: tuple[Xid, ...] = ()
    stuck: tuple[int, ...] = ()
    gpus: tuple[str, ...] = ()
    visible: str | None = None


class NodeCheck:
    """The check of one node, under way. `close` ends it.

    Args:
        context: the node's fork server.

    Raises:
        OSError: a process could not be started.
    """

    def __init__(self, spec: NodeSpec, context: Context) -> None:
        self._meeting = spec.meeting
        self._meeting.unlink(missing_ok=True)
        in_ram = [tier for tier in spec.tiers if storage.lies_in_ram(tier.path)]
        procs, limit_s = len(spec.devices), spec.limit_s
        computing = compute_tasks(procs, spec.device, self._meeting, limit_s, devices=spec.devices, visible=spec.visible)
        tasks = list(computing)
        tasks += [Task((tier.check,), disk.check, (tier, False), spec.limit_s) for tier in spec.tiers if tier not in in_ram]
        if spec.device == "cuda":
            tasks.append(Task((gpus.CHECK,), gpus.check, (max(spec.devices, default=-1) + 1, spec.devices), spec.limit_s))
            if spec.stuck:  # computing takes some of that memory, and would fail for want of it
                tasks = [replace(task, after=gpus.MEMORY) if task in computing else task for task in tasks]
                tasks.append(Task((gpus.MEMORY,), gpus.freed, (spec.stuck, spec.limit_s), spec.limit_s))
        self._at_once = [  # none of it hangs: RAM has no server and no device
            machine.reach(spec.addr),
            *machine.judge_limits(
                machine.limits_of(), ranks=len(spec.devices), world=spec.world, rdma=bool(spec.rdma_ports), running=True
            ),
            *(disk.judge(tier, disk.inspect(tier)) for tier in in_ram),
            *gpus.judge_faults(spec.gpu_faults, spec.gpus),
        ]
        self.examination = Examination(tasks, context, spec.limit_s)

    def report(self) -> Report:
        """What was found so far."""
        found = (*self._at_once, *self.examination.findings)
        return Report(settle(found), self.examination.took_s)

    def close(self) -> None:
        """End what still runs."""
        self.examination.close()
        self._meeting.unlink(missing_ok=True)


def settle(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """A tier that fails is left out of a run, and does not keep a node out of it as long as there is another."""
    tiers = [finding for finding in findings if finding.check.startswith("tier ")]
    if all(finding.verdict == "fail" for finding in tiers):
        return tuple(findings)
    return tuple(replace(each, verdict="warn") if each in tiers and each.verdict == "fail" else each for each in findings)


def compute_tasks(
    procs: int,
    device: str,
    meeting: Path,
    limit_s: float,
    numbers: int = 1 << 16,
    devices: tuple[int, ...] = (),
    visible: str | None = None,
) -> list[Task]:
    """A process for each rank, which together compute and add up."""
    ranks = compute.Ranks(procs, device, meeting, limit_s, numbers, devices, visible)
    return [Task(compute.names(ranks.device_of(rank)), compute.check, (rank, ranks), limit_s) for rank in range(procs)]


def tiers_of(stored: Mapping[str, Any], node: int) -> tuple[disk.TierSpec, ...]:
    """The tiers of one node, out of what `resilient.storage` has written down."""
    roots = [(tier["name"], Path(tier["roots"][0 if tier["durable"] else node])) for tier in stored["tiers"]]
    return tuple(disk.TierSpec(name, root, measured=False) for name, root in roots)
