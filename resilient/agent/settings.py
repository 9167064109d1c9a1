"""What an agent is started with."""

from dataclasses import dataclass, field
from pathlib import Path

from resilient.placement.binding import NOWHERE, Binding


@dataclass(frozen=True)
class AgentSettings:
    """Durations are in seconds.

    Attributes:
        driver: its addresses.
        token: the run's secret, a dot, and the agent's incarnation.
        place: in the fabric.
        gpus: of the local ranks, as addresses on the PCI bus; empty where one is not known.
    """

    node: int
    procs: int
    run_dir: Path
    run_id: str
    entrypoint: str
    fence_s: float
    health_s: float
    world: int
    device: str
    driver: str
    token: str = field(repr=False)
    addr: str
    binding: Binding = NOWHERE
    place: str = ""
    gpus: tuple[str, ...] = ()

    @property
    def config(self) -> Path:
        """The resolved config's file."""
        return self.run_dir / "config.yaml"
