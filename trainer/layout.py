"""How ranks share a campaign's work: the one place that settles it against the world that is really there. Pure, without torch.

Under the supervisor the config has been checked against the ranks that it starts; under torchrun whoever typed the command says
how many there are, and a batch that does not come out even must be an error, not a smaller batch.
"""

from dataclasses import dataclass

from resilient.worker import Config, ConfigError, Problem


@dataclass(frozen=True)
class Layout:
    """A settled layout: the global batch is micro batch × `dp` × `accumulation`."""

    world_size: int
    dp: int
    accumulation: int


def settle(config: Config, world_size: int) -> Layout:
    """The layout of `config` on `world_size` ranks.

    Raises:
        ConfigError: these ranks cannot train it; names the key and what is allowed.
    """
    parallel, train = config.parallel, config.train
    dp = world_size if parallel.dp == "auto" else parallel.dp
    if dp != world_size:
        message = f"there are {world_size} ranks; allowed: {world_size}, or auto"
        raise ConfigError([Problem("parallel.dp", parallel.dp, message)])
    one = train.micro_batch_size * dp
    if train.global_batch_size % one:
        message = f"must be a multiple of micro_batch_size × dp = {train.micro_batch_size} × {dp} = {one}"
        raise ConfigError([Problem("train.global_batch_size", train.global_batch_size, message)])
    return Layout(world_size, dp, train.global_batch_size // one)
