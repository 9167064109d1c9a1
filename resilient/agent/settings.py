"""What an agent is started with."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class AgentSettings:
    """Attributes: token: what the driver knows it by, a dot, and its incarnation; driver: its addresses; durations in seconds."""

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
    token: str
    addr: str

    @property
    def config(self) -> Path:
        """The resolved config's file."""
        return self.run_dir / "config.yaml"
