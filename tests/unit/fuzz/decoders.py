"""All that reads what others have written: real inputs, the call, and the errors that it may answer with."""

from pathlib import Path

from decoder import Decoder
from decoders_of_checkpoints import checkpoints
from decoders_of_data import data, foreign
from decoders_of_messages import messages
from decoders_of_nodes import node
from decoders_of_runs import campaigns, configs, reports
from decoders_of_slurm import slurm


def decoders(directory: Path) -> list[Decoder]:
    """All of them. Args: directory: in RAM, for inputs that are files."""
    return [
        *messages(),
        *checkpoints(directory),
        *campaigns(directory),
        *reports(directory / "reported"),
        *configs(directory),
        *slurm(directory),
        *node(directory),
        *data(directory),
        *foreign(directory / "foreign"),
    ]
