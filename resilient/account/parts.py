"""What an account consists of: the parts, the incidents, the jobs. Pure."""

from dataclasses import dataclass, field

PARTS = {
    "productive": "steps that were computed for the first time",
    "data": "waiting for samples",
    "evaluation": "validation",
    "snapshot": "standing still for a copy of the state",
    "start": "from the start of a job to its first step",
    "detection": "from when something went wrong until it was known",
    "restart": "from when a fault was known, or nodes were to change, until ranks were started again",
    "restore": "from the start of ranks that go on from a step until their first step began",
    "rework": "steps that were computed again or cut off",
    "link": "waiting for a link",
    "finish": "from the last step to the end of a job",
    "idle": "between steps, for no reason that is known",
}
"""The parts of the account, and what they are; each sentence stands alone, for they are shown in any order."""

# Actions that stop no rank: the time stays with the steps.
GOES_ON = ("report", "recompute_batch", "skip_batch", "restart_agent", "exclude_node")
PLANNED = ("time_limit", "preempted")  # faults that cost nothing by themselves: ranks compute until the drain stops them


@dataclass
class Incident:
    """One fault that cost time.

    Attributes:
        action: what was done about it.
        incident_id: of the first of the faults that met with it; its own where it is the first, or alone.
        lost_steps: that had to be computed again; None as long as that is not known.
        seconds: of wall time by part, from the fault to the recovery; what it cost. Of faults that overlap the first has it all.
    """

    fault_id: str
    incident_id: str
    t: float
    kind: str
    detail: str
    ranks: list[int]
    nodes: list[int]
    action: str = ""
    lost_steps: int | None = None
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass
class Kind:
    """All faults of one kind.

    Attributes:
        lost_steps: that had to be computed again; of faults that met each step once, with the first that is over.
        seconds: of wall time by part, as of an incident.
    """

    faults: int = 0
    recovered: int = 0
    lost_steps: int = 0
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass
class Run:
    """One job of the campaign, from the start of its driver.

    Attributes:
        t: unix seconds; until_t: of the last that is known of it.
        exit_code: None where it has not ended, or without a word.
        generation: its last; 0 before its first.
        step: the last that it has finished; 0 before its first.
        faults: those that were not planned; lost_steps: that had to be computed again.
        seconds: of wall time by part.
    """

    t: float
    until_t: float
    exit_code: int | None = None
    generation: int = 0
    step: int = 0
    faults: int = 0
    lost_steps: int = 0
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass
class Account:
    """Seconds × ranks by part, over all jobs; `wall_s` is their time.

    Attributes:
        incidents, runs: the newest, oldest first.
        kinds: all faults, by kind.
    """

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    wall_s: float = 0.0
    incidents: list[Incident] = field(default_factory=list)
    kinds: dict[str, Kind] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)

    @property
    def rank_s(self) -> float:
        """All of it."""
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float | None:
        """The share that was productive; None before there is anything."""
        return self.seconds["productive"] / self.rank_s if self.rank_s else None
