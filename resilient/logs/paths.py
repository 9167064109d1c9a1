"""Where logs are in the run directory. Pure.

`logs/g<generation>/node<k>.log` is what the ranks of a node have printed in one generation, `logs/agent<k>.log` what its agents
have, and `logs/agents.log` what a step of Slurm has printed before an agent had a log of its own. `driver.log` is what the command
has said, `driver.log.1` what it had said before, and so on.
"""

from pathlib import Path

DIRECTORY = "logs"
DRIVER_LOG = "driver.log"
STEP_OF_MANY = "agents"  # the name of a step of Slurm that starts the agents of several nodes


def agent_log(run_dir: Path, node: int) -> Path:
    """What the agents of a node have printed."""
    return run_dir / DIRECTORY / f"agent{node}.log"


def step_log(run_dir: Path, name: str) -> Path:
    """What a step of Slurm has printed before its agents wrote logs of their own."""
    return run_dir / DIRECTORY / f"{name}.log"


def generation_directory(run_dir: Path, generation: int) -> Path:
    """The logs of a generation."""
    return run_dir / DIRECTORY / f"g{generation}"


def node_log(run_dir: Path, generation: int, node: int) -> Path:
    """What the ranks of a node have printed in a generation."""
    return generation_directory(run_dir, generation) / f"node{node}.log"
