"""Ranks under the eyes of a watchdog: what they report, and what an inspection finds of them."""

from control_play import beat

from resilient.control.judgement import culprit
from resilient.control.learning import Limits
from resilient.control.liveness import Suspicion, Watchdog
from resilient.protocol.messages import Heartbeat, Inspection
from resilient.recovery.faults import Fault

LIMITS = Limits(floor_s=2.0, ceiling_s=100.0)

MAIN = "Current thread 0x00007f00 (most recent call first):\n"
OTHER = 'Thread 0x00007f11 (most recent call first):\n  File "/x/threading.py", line 320 in wait\n\n'
COLLECTIVE = MAIN + (
    '  File "/x/torch/distributed/distributed_c10d.py", line 2501 in all_reduce\n'
    '  File "/x/torch/distributed/c10d_logger.py", line 81 in wrapper\n  File "/y/train.py", line 10 in main\n'
)
COMPILER = MAIN + '  File "/x/torch/_inductor/codecache.py", line 1 in load\n  File "/y/train.py", line 11 in main\n'
LOADER = OTHER + MAIN + '  File "/y/data.py", line 7 in __getitem__\n  File "/y/train.py", line 9 in main\n'


def received(watchdog: Watchdog, rank: int, heartbeat: Heartbeat) -> None:
    watchdog.on_heartbeat(rank, heartbeat, heartbeat.beat_t + heartbeat.silent_s)


def judged(watchdog: Watchdog, suspicion: Suspicion, inspections: dict[int, Inspection]) -> Fault | None:
    """The fault, where all ranks were asked."""
    return culprit("g1-1", suspicion, inspections, list(watchdog.alive), watchdog.alive, lambda rank: rank, LIMITS.ceiling_s)


def warm(ranks: int = 2, step_s: float = 0.1, *, phased: bool = True) -> Watchdog:
    """Ranks that have done ten steps."""
    watchdog = Watchdog(LIMITS)
    watchdog.begin()
    for step in range(11):
        for rank in range(ranks):
            received(watchdog, rank, beat(step, step * step_s, phased=phased))
            if step < 10:
                received(watchdog, rank, beat(step, step * step_s, silent_s=max(0.0, step_s - 1.0), phased=phased))
    return watchdog


def silent(watchdog: Watchdog, seconds: float, *ranks: int, phase: str = "step", state: str = "S", phased: bool = True) -> None:
    for rank in ranks:
        received(watchdog, rank, beat(10, 1.0, silent_s=seconds, phase=phase, state=state, phased=phased))


def seen(stacks: str, state: str = "S", cpu: float = 0.0) -> Inspection:
    return Inspection(state=state, cpu=cpu, stacks=stacks)
