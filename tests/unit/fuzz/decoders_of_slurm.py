"""What Slurm and its environment say, and files of chains of jobs."""

import os
from pathlib import Path

from decoder import Decoder, in_file

_SCRIPT = b"""#!/bin/bash
#SBATCH --time=00:20:00 --signal=B:USR1@60
module load GCC   # before the environment
export NCCL_IB_TIMEOUT=50
ARGS=(--save "$SCRATCH/$SLURM_JOB_ID" --exit-duration-in-mins 60)
cat <<'END' > x
text (
END
for n in $(hostname); do srun -w "$n" bash -c "python a.py ${ARGS[@]:-x} (" 2>&1 | tee log & done
wait $!
"""
_SCONTROL = b"""JobId=17 JobName=x Requeue=1 JobState=RUNNING Reason=None NodeList=n[1-3,07],m1 BatchHost=n1 NumNodes=5
JobId=18 HetJobId=17 HetJobOffset=1 JobName=x Requeue=1 JobState=RUNNING Reason=None NodeList=m2 BatchHost=m2 NumNodes=1
"""
_RESERVATIONS = b"""ReservationName=a StartTime=2026-11-23T10:00:00 EndTime=2026-11-24T10:00:00 Nodes=n[1-3],m Flags=MAINT
ReservationName=b StartTime=2026-11-25T10:00:00 EndTime=2026-11-26T10:00:00 Nodes=n2 NodeCnt=1 Flags=MAINT State=INACTIVE
"""
_SQUEUE = b"""17                      RUNNING         2026-11-23T10:00:00     N/A                     2026-11-23T09:00:00     None
18                      PENDING         N/A                     2026-11-23T10:00:00     N/A                     Dependency, and more
"""
_CHAIN = b"""{"t": 1.5, "what": "begun", "name": "quick-1234"}
{"t": 2.5, "what": "submitted", "job": "17", "after": null}
{"t": 3.5, "what": "started", "job": "17", "step": 0}
{"t": 4.5, "what": "ended", "job": "17", "exit_code": 75}
{"t": 4.5, "what": "cancelled", "job": "18"}
{"t": 5.5, "what": "stopped"}
{"t": 6.5, "what": "ended", "job": "19", "exit_code": 70}
"""


def slurm(directory: Path) -> list[Decoder]:
    from resilient import ledger
    from resilient.batch.job import read as read_job
    from resilient.batch.shell import NestedTooDeep
    from resilient.batch.traps import traps
    from resilient.exits import EnvironmentUnusable
    from resilient.slurm import badnodes, chain, history, hosts, maintenance, queue, roster
    from resilient.slurm.allocation import Allocation

    def records(path: Path) -> None:
        found = list(chain.whole(ledger.read(path)))
        folded = chain.fold(found)
        assert folded.stuck in (True, False)
        chain.name(found)
        jobs = history.history(found, queue.parse_queue(_SQUEUE.decode()))
        history.queued_s(found, jobs, [(0.0, 1.0)], 1.0, 10.0)

    def environ(data: bytes) -> None:
        names = (
            "SLURM_JOB_NODELIST",
            "SLURM_JOB_CPUS_PER_NODE",
            "SLURM_HET_SIZE",
            "SLURM_PROCID",
            "SLURM_STEP_ID",
            "SLURM_JOB_ID",
            "SLURMD_NODENAME",
        )
        Allocation.of(dict(zip(names, os.fsdecode(data).split("\n"), strict=False)), "n1")

    text = os.fsdecode
    return [
        Decoder("chain.jsonl", lambda: [_CHAIN], in_file(directory / "chain.jsonl", records)),
        Decoder(
            "host list",
            lambda: [b"n[1-3,07],m1", b"a[1-2]b[01-12]", b"x"],
            lambda data: hosts.fold(hosts.expand(text(data))),
            (ValueError,),
        ),
        Decoder("CPU counts", lambda: [b"48(x3),24"], lambda data: hosts.counts(text(data)), (ValueError,)),
        Decoder("roster", lambda: [b"1:0:n[1-3];2:3:m1"], lambda data: roster.read(text(data)), (ValueError,)),
        Decoder(
            "roster variable",
            lambda: [b"1:0:n[1-3];2:3:m1"],
            lambda data: roster.seat_of({roster.VARIABLE: text(data)}, "n1"),
            (EnvironmentUnusable,),
        ),
        Decoder(
            "allocation",
            lambda: [b"n[1-2]\n4(x2)\n0\n0\n0\n17\nn1", b"n1\n4"[:4] + b"\n0\n0\n0\n17"],
            environ,
            (EnvironmentUnusable,),
        ),
        Decoder("batch script", lambda: [_SCRIPT], lambda data: traps(read_job(data.decode(errors="replace"))), (NestedTooDeep,)),
        Decoder("squeue", lambda: [_SQUEUE], lambda data: queue.parse_queue(text(data))),
        Decoder("scontrol", lambda: [_SCONTROL], lambda data: queue.parse_allotted(text(data)), (queue.SlurmSilent,)),
        Decoder("scontrol show reservation", lambda: [_RESERVATIONS], lambda data: list(maintenance.parse(text(data)))),
        Decoder(
            "scontrol show config",
            lambda: [b"x = 1\nKillWait               = 30 sec\n"],
            lambda data: queue.parse_kill_wait(text(data)),
        ),
        Decoder(
            "bad_nodes.json",
            lambda: [b'[{"host": "n1", "reason": "x", "t": 1.5, "until_t": 9e9}]'],
            in_file(directory / "bad" / badnodes.FILE, lambda path: badnodes.bad_nodes(path.parent)),
        ),
    ]
