"""The entry point: `train`, and what the runtime asks of the module beside it: `prepare`, `warm_up`, `plan`,
`checkpoint_size`, `rank_work`, `PRELOAD`.

Light to import: torch comes in with the first call of `train`.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from resilient.worker import Config, ConfigError, Problem, RankWork, layout

# What forked workers need: imported ahead by the fork server. None of these starts a thread or touches a GPU.
PRELOAD = (
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.device_mesh",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch.distributed.tensor.experimental",
    "torch.optim.adamw",
    "zarr",
    "zarr.codecs",
    "zarr.storage",
    "checkpoint.loading",
    "checkpoint.restoring",
    "checkpoint.saving",
    "checkpoint.tiers.remote",
    "checkpoint.tiers.snapshots",
    "trainer.loop",
    "trainer.warming",
)


def train(config: Config) -> bool:
    """Train as one rank; every rank calls it. Whether the last step is reached."""
    from trainer.loop import run

    return run(config)


def warm_up(config: Config, rank: int, world_size: int) -> None:
    """Ahead of the next generation, in a process that will be one of its ranks: what the first step does once."""
    from trainer.warming import run

    run(config, rank, world_size)


def prepare(config: Config, progress: Callable[[str, int, int], None]) -> list[Path]:
    """Once per job, before the ranks: make the data ready. Returns the files that were made of the config's text.

    Raises:
        ConfigError: names the key.
        EnvironmentUnusable: the place for the data is not good, as a disk that is full.
    """
    import os

    from trainer.data.build import prepare as prepare_data
    from trainer.data.errors import DataError
    from trainer.sources import PREPARED, refused, tokenizer_file, was_trained, with_other_data

    data = config.data
    made: list[Path] = []
    try:
        if data.text is not None:
            prepared = prepare_data(
                data.text,
                config.run_dir / PREPARED,
                vocab_size=data.tokenizer.vocab_size,
                vocab_file=data.tokenizer.vocab_file,
                merges_file=data.tokenizer.merges_file,
                progress=progress,
                workers=len(os.sched_getaffinity(0)),
                trained_on=was_trained(config),
                accepted=with_other_data(config),
            )
            made = [Path(f"{prepared.prefix}{suffix}") for suffix in (".idx", ".bin", ".tokenizer.json")]
        elif config.model.vocab_size == "auto" and not tokenizer_file(config).is_file():
            message = (
                f"there is no {tokenizer_file(config)}; name data.tokenizer.vocab_file and merges_file, or give model.vocab_size"
            )
            raise ConfigError([Problem("data.path", None, message)])
        _open_all(config)
    except DataError as error:
        raise refused(config, error) from None
    return made


def _open_all(config: Config) -> None:
    """Open what the ranks will open; a bad dataset is one message now instead of one per rank later."""
    from trainer.data.samples import open_split
    from trainer.sources import datasets, end_of_text, vocabulary

    vocabulary(config)
    end_of_text(config)
    open_split(datasets(config), config.data.split, "train", config.model.seq_len, config.seed)
    if config.data.split[1]:
        open_split(datasets(config), config.data.split, "valid", config.model.seq_len, config.seed)


def checkpoint_size(config: Config) -> tuple[int, int]:
    """Bytes and files of one checkpoint, on any layout. Raises like `prepare`."""
    from trainer.plan import checkpoint_bytes, checkpoint_files
    from trainer.shape import shape_of

    shape = shape_of(config, _vocabulary(config)[0])
    return checkpoint_bytes(config, shape), checkpoint_files(config, shape)[1]


def rank_work(config: Config) -> list[RankWork]:
    """What ranks do in a step and hold meanwhile, by pipeline rank. Raises like `prepare`."""
    from trainer.shape import shape_of
    from trainer.work import rank_work as counted

    return counted(config, shape_of(config, _vocabulary(config)[0]), layout(config, cpu_count=1, gpu_count=1))


def plan(config: Config) -> Mapping[str, Mapping[str, object]]:
    """What a rank holds and a checkpoint weighs, by title and name. Raises like `prepare`."""
    from trainer.plan import sections

    vocab, known = _vocabulary(config)
    return sections(config, vocab, known=known)


def _vocabulary(config: Config) -> tuple[int, bool]:
    """Tokens that the data may hold, and whether that is known or what will be asked of a tokenizer that is not trained yet."""
    from trainer.data.errors import DataError
    from trainer.sources import refused, tokenizer_file, vocabulary

    known = config.model.vocab_size != "auto" or tokenizer_file(config).is_file()
    try:
        return (vocabulary(config) if known else config.data.tokenizer.vocab_size), known
    except DataError as error:
        raise refused(config, error) from None
