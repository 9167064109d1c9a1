"""Checkpoints and their tiers, how patient the supervisor is with faults, and whether they may be injected."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from resilient.config.fields import Auto, Count, Flag, NonNegative, Positive, Seconds, Section, no_bool, off


class Tier(Section):
    """One place that holds checkpoints."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")]
    path: Path
    keep_last: Count | Auto = Field("auto", description="newest ones that are kept; auto: 3 on the durable tier, 1 in RAM, else 2")
    keep_every: Count | None = Field(None, description="on the durable tier, multiples of so many steps are kept for good")
    every_steps: Count | Auto | None = Field(
        None, description="auto: the interval of Young and Daly; unset: checkpoint.every_steps, and for a tier in RAM every step"
    )
    every_s: Seconds | None = Field(None, description="in place of every_steps: at the first step after so many seconds")
    replicas: NonNegative | Auto = Field(
        0,
        description="1: another node keeps a copy of each node's part; with hybrid sharding none is made in RAM where another node "
        "holds the same anyway; auto: 1 in RAM, else 0",
    )
    max_mib_s: Positive | None = Field(None, description="write no faster than this")


class Checkpoint(Section):
    """When state is saved, and where; tiers are listed fastest first, and the last one is the durable one."""

    every_steps: Count | Auto = Field(10, description="of the durable tier; auto: the interval of Young and Daly")
    tiers: Annotated[list[Tier], Field(min_length=1)] = Field([Tier(name="durable", path=Path("${run_dir}/checkpoints"))])
    memory_cost: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False), BeforeValidator(no_bool)] = Field(
        0.005,
        description="where no tier but the durable one is named: snapshots in RAM as often as they take at most this share of the "
        "time, which is measured, every step where that is so; 0: none but those on their way to the durable tier",
    )


class Resilience(Section):
    """How patient the supervisor is, and when it gives up."""

    link_grace_s: Seconds | Auto = Field(
        "auto", description="ranks may wait for each other so long while a link is down or has just come back; auto: 60"
    )
    fence_s: Seconds | Auto = Field("auto", description="an agent without its driver for so long kills its workers; auto: 180")
    lost_s: Seconds | Auto = Field(
        "auto", description="a node whose agent sends nothing for so long is lost; auto: 8 while a spare stands by, else 35"
    )
    rejoin_s: Annotated[float, Field(ge=0, allow_inf_nan=False), BeforeValidator(no_bool)] | Auto = Field(
        "auto", description="a lost node is waited for so long, where no spare is there, before fewer nodes go on; auto: 30"
    )
    without_spare: Literal["auto", "shrink", "wait", "next_job"] = Field(
        "auto",
        description="where a node is gone and no spare is there: fewer go on, it is waited for, or the job ends for the next one; "
        "auto: what costs least, by what nodes have taken to come back, jobs to start, and the time left",
    )
    drain_s: Seconds | Auto = Field(
        "auto",
        description="time that a stop on request may take before workers are killed; auto: 25, and in a job of Slurm twice what a "
        "stop was measured to take if that is longer",
    )
    run_dir_patience_s: Seconds | Auto = Field(
        "auto",
        description="training goes on for so long while the run directory cannot be written, then the job drains; a job waits as "
        "long for one that does not answer before it begins; auto: 900",
    )
    files_patience_s: Annotated[float, Field(ge=0, allow_inf_nan=False), BeforeValidator(no_bool)] = Field(
        300.0,
        description="files that ranks find missing or unreadable are waited for so long, once ranks have trained in this job, "
        "before that counts as a failure like others; 0: they are not waited for",
    )
    hang_floor_s: Seconds = Field(
        10.0,
        description="shortest silence after which a rank is suspected of a hang; the limit itself is learned: five times "
        "the silence that is usual in a step",
    )
    hang_ceiling_s: Seconds = Field(
        600.0,
        description="longest silence after which a rank that others wait for is suspected of a hang, whatever was learned and "
        "whatever it does; it is the limit as long as nothing was learned of a phase",
    )
    health_check: Flag | Seconds = Field(
        True,
        description="nodes are checked before they take part: right results, a tier to write to, limits; a number: seconds that it "
        "may take, true: 30, and 120 on GPUs, which may be cold",
    )
    gpu_standby: Literal["auto"] | Flag = Field(
        "auto",
        description="processes that stand by to be ranks have a context, cuBLAS, attention kernels and compiled layers ready "
        "on their GPUs; auto: where the memory of a GPU has room for that beside its rank",
    )
    straggler: Annotated[Literal["off", "report", "replace"], BeforeValidator(off)] = Field(
        "report", description="a rank that is persistently slower than others with the same work; replace: its node, once"
    )
    straggler_factor: Annotated[float, Field(gt=1), BeforeValidator(no_bool)] = Field(
        1.5, description="so many times the median of the others, in what it spends without waiting for them"
    )
    straggler_steps: Count = Field(50, description="over which that is measured; it is reported after two such windows in a row")
    on_stop: Literal["raise", "signal", "callback"] = Field(
        "raise",
        description="how a script that does not ask (worker.should_stop) is stopped, after the same optimizer step on all ranks: "
        "SystemExit before its next step, SIGTERM for a script that handles it, or not at all, as an adapter asks",
    )
    on_hangup: Literal["go_on", "drain"] = Field(
        "go_on",
        description="what SIGHUP does, which comes when a terminal is closed: nothing but a line in driver.log, or a stop as by "
        "Ctrl-C; under `nohup` it never does anything",
    )
    max_restarts_per_hour: NonNegative = Field(
        30, description="after so many restarts within an hour, the next fault ends the run with exit 70"
    )
    give_up_after_same_step: Count = Field(
        3, description="failures of the same kind at the same step, without progress; twice as many if they differ"
    )
    max_roll_backs: NonNegative = Field(
        3, description="to ever older checkpoints because the numbers are bad, without progress; then it gives up"
    )
    backoff_s: Seconds = Field(
        30.0, description="longest pause before a restart: 0.5 s, then twice as long with each restart that brought no progress"
    )


class Chaos(Section):
    """Whether this campaign may be broken on purpose."""

    allow: Flag = Field(False, description="`resilient chaos` may inject faults; ranks look out for those that they are to make")
