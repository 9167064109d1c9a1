"""The layouts that a config's ranks can be spread over, by predicted step time. Pure but for the hook that counts work."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product

from pydantic import ValidationError

from resilient.config import Config, ConfigError, Layout
from resilient.steptime.rates import Rates
from resilient.steptime.work import RankWork, of_step
from resilient.throughput import bubble


@dataclass(frozen=True)
class Candidate:
    """A layout that is possible.

    Attributes:
        config: with its sizes.
        step_s: predicted.
        memory_bytes: the most that tensors take on a rank at one time.
        bubble: share of a step.
        fits: into the memory of GPUs, as far as that is known.
    """

    config: Config
    layout: Layout
    step_s: float
    memory_bytes: int
    bubble: float
    fits: bool

    @property
    def tokens_per_s(self) -> float:
        return self.config.train.global_batch_size * self.config.model.seq_len / self.step_s


def spread_over(config: Config, world_size: int) -> Iterator[Config]:
    """The config with each product of tp, cp and pp that divides the ranks; what of the rest forbids it is not asked."""
    divisors = [size for size in range(1, world_size + 1) if world_size % size == 0]
    bound = "auto" not in (config.parallel.dp_shard, config.parallel.dp_replicate)  # dp is
    shard = "auto" if bound else config.parallel.dp_shard
    for tp, cp, pp in product(divisors, repeat=3):
        if world_size % (tp * cp * pp) == 0:
            sizes = {"tp": tp, "cp": cp, "pp": pp, "dp": "auto", "dp_shard": shard, "pp_layers": "auto"}
            values = config.model_dump()
            with suppress(ValidationError):
                yield Config.model_validate({**values, "parallel": {**values["parallel"], **sizes}})


def ordered(
    config: Config,
    layout_of: Callable[[Config], Layout],
    work_of: Callable[[Config, Layout], Sequence[RankWork]],
    crowding_of: Callable[[Config, Layout], float],
    rates: Rates,
) -> list[Candidate]:
    """Those that are possible, the fastest first, and behind them those that do not fit.

    Args:
        layout_of: raises ConfigError where a layout is not possible.
        work_of: by pipeline rank; may raise ConfigError, too.
    """
    found = []
    for each in spread_over(config, layout_of(config).world_size):
        with suppress(ConfigError):
            layout = layout_of(each)
            ranks = work_of(each, layout)
            seconds = rates(of_step(each, layout, ranks, crowding_of(each, layout)))
            most = max(rank.peak_bytes for rank in ranks)
            fits = all(rank.fits for rank in ranks)
            found.append(Candidate(each, layout, seconds, most, bubble(each, layout), fits))
    return sorted(found, key=lambda candidate: (not candidate.fits, candidate.step_s))
