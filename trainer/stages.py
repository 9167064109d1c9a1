"""Stages of the pipeline: which layers each holds, and on which rank it is. Pure, without torch.

Stages go round: stage s is on pipeline rank s mod pp, so that with virtual stages each rank holds several, far apart
(Narayanan et al., 2021).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from resilient.worker import Config, Layout


@dataclass(frozen=True)
class Stage:
    """A run of layers; the first stage also embeds, the last one has the head."""

    index: int
    count: int
    layers: range

    @property
    def first(self) -> bool:
        return self.index == 0

    @property
    def last(self) -> bool:
        return self.index == self.count - 1


def stages(layers: int, count: int, given: list[int] | None = None) -> list[Stage]:
    """All stages in order; where the layers do not come out even, the first stages have one more.

    Args:
        given: layers of each stage, to have it otherwise.
    """
    sizes = given or [layers // count + (index < layers % count) for index in range(count)]
    starts = [sum(sizes[:index]) for index in range(count)]
    return [Stage(index, count, range(start, start + size)) for index, (start, size) in enumerate(zip(starts, sizes, strict=True))]


def of_rank(config: "Config", layout: "Layout", pp_rank: int) -> list[Stage]:
    """The stages of one pipeline rank."""
    given = None if config.parallel.pp_layers == "auto" else config.parallel.pp_layers
    return stages(config.model.layers, layout.pp * layout.virtual_stages, given)[pp_rank :: layout.pp]
