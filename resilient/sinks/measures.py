"""The measures of a campaign by the conventions of Prometheus: names, units, what they say, and their values. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from resilient.sinks.totals import Totals

Values = Mapping[str, float]


@dataclass(frozen=True)
class Measure:
    """A measure.

    Attributes:
        name: counters end with `_total`, as they are shown.
        label: by which it has several values; None: it has one.
    """

    name: str
    kind: Literal["gauge", "counter"]
    help: str
    label: str | None = None


STEP_SECONDS = "resilient_step_seconds"
STEP_SECONDS_HELP = "Duration of optimizer steps, those that were computed again included."


def _gauge(name: str, help: str, label: str | None = None) -> Measure:
    return Measure(f"resilient_{name}", "gauge", help, label)


def _counter(name: str, help: str, label: str | None = None) -> Measure:
    return Measure(f"resilient_{name}_total", "counter", help, label)


_LAST = {
    "loss": _gauge("loss", "Training loss of the last step."),
    "grad_norm": _gauge("gradient_norm", "Global gradient norm of the last step."),
    "lr": _gauge("learning_rate", "Learning rate of the last step."),
    "samples": _gauge("samples_consumed", "Samples that the weights have seen."),
    "tokens": _gauge("tokens_consumed", "Tokens that the weights have seen."),
    "tokens_per_s": _gauge("tokens_per_second", "Tokens per second in the last step, all ranks together."),
    "mfu": _gauge("model_flops_utilization_ratio", "Model FLOPs utilization of the last step."),
    "memory_bytes": _gauge("peak_memory_bytes", "Peak memory of rank 0."),
}
_UP = _gauge("up", "1 while a job of the campaign runs.")
_EXIT = _gauge("exit_code", "Exit code of the last job, once it has ended.")
_JOBS = _counter("jobs", "Jobs of the campaign that have started.")
_GENERATION = _gauge("generation", "Generation of the ranks.")
_WORLD = _gauge("world_size", "Ranks of the newest generation.")
_STEP = _gauge("step", "Last optimizer step.")
_TARGET = _gauge("target_step", "Step at which the campaign is done.")
_STEP_T = _gauge("last_step_timestamp_seconds", "When the last step ended, in unix time.")
_VALIDATION = _gauge("validation_loss", "Last validation loss.")
_GOODPUT = _gauge("goodput_ratio", "Share of the ranks' time in steps that were computed for the first time.")
_TIME = _gauge("rank_seconds", "Seconds times ranks, by what they went into.", "part")
_FAULTS = _counter("faults", "Faults, by kind.", "kind")
_ACTIONS = _counter("actions", "What was done about faults.", "action")
_RECOVERED = _counter("recoveries", "Faults after which training has gone on.")
_DOWNTIME = _counter("downtime_seconds", "Time from faults to the first step after them.")
_LOST = _counter("lost_steps", "Steps that had to be computed again.")
_LINKS = _counter("link_changes", "What links were seen to do.", "state")
_SNAPSHOTS = _counter("snapshots", "Snapshots that are whole, by tier.", "tier")
_STALL = _counter("snapshot_stall_seconds", "Time for which training stood still for snapshots.")
_COMMITTED = _counter("checkpoints_committed", "Durable checkpoints.", "tier")
_REJECTED = _counter("checkpoints_rejected", "Checkpoints that were not gone on from.")
_CHECKPOINT = _gauge("checkpoint_step", "Step of the newest durable checkpoint that was not refused.", "tier")
_CHECKPOINT_T = _gauge("checkpoint_timestamp_seconds", "When it was made durable, in unix time.", "tier")

MEASURES: tuple[Measure, ...] = (
    _UP, _EXIT, _JOBS, _GENERATION, _WORLD, _STEP, _TARGET, _STEP_T, *_LAST.values(), _VALIDATION, _GOODPUT, _TIME, _FAULTS,
    _ACTIONS, _RECOVERED, _DOWNTIME, _LOST, _LINKS, _SNAPSHOTS, _STALL, _COMMITTED, _REJECTED, _CHECKPOINT, _CHECKPOINT_T,
)  # fmt: skip


def measured(totals: Totals) -> Iterator[tuple[Measure, Values]]:
    """Each measure with its value, under "" where it has no label; those that nothing is known of yet are left out."""
    single = {
        _UP: float(totals.running),
        _EXIT: totals.exit_code,
        _JOBS: totals.jobs,
        _GENERATION: totals.generation,
        _WORLD: totals.world_size,
        _STEP: totals.step,
        _TARGET: totals.target_step,
        _STEP_T: totals.step_t,
        _VALIDATION: totals.validation_loss,
        _GOODPUT: totals.goodput,
        _RECOVERED: totals.recovered,
        _DOWNTIME: totals.downtime.down_s,
        _LOST: totals.downtime.lost_steps,
        _STALL: totals.stall_s,
        _REJECTED: totals.rejected,
        **{measure: totals.last.get(name) for name, measure in _LAST.items()},
    }
    for measure, value in single.items():
        if value is not None:
            yield measure, {"": float(value)}
    newest = totals.checkpoints.newest()
    labelled: dict[Measure, Mapping[str, float]] = {
        _TIME: totals.rank_seconds,
        _FAULTS: totals.faults,
        _ACTIONS: totals.actions,
        _LINKS: totals.links,
        _SNAPSHOTS: totals.snapshots,
        _COMMITTED: totals.committed,
        _CHECKPOINT: {tier: step for tier, (step, _) in newest.items()},
        _CHECKPOINT_T: {tier: t for tier, (_, t) in newest.items()},
    }
    for measure, values in labelled.items():
        if values:
            yield measure, values
