"""The entry point: `train`, and what the runtime asks of the module beside it: `prepare`, `plan`, `PRELOAD`.

Light to import: torch comes in with the first call of `train`.
"""

from collections.abc import Callable, Mapping

from resilient.worker import Config, ConfigError, Problem, layout

# What forked workers need: imported ahead by the fork server. None of these starts a thread or touches a GPU.
PRELOAD = (
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.device_mesh",
    "torch.nn.utils.clip_grad",
    "torch.optim.adamw",
    "zarr",
    "zarr.codecs",
    "zarr.storage",
    "checkpoint.loading",
    "checkpoint.newest",
    "checkpoint.saving",
    "trainer.loop",
)


def train(config: Config) -> None:
    """Train as one rank; every rank calls it."""
    from trainer.loop import run

    run(config)


def prepare(config: Config, progress: Callable[[str, int, int], None]) -> None:
    """Once per job, before the ranks: refuse what this trainer cannot do, and make the data ready.

    Raises:
        ConfigError: names the key.
    """
    import os

    from trainer.data.build import prepare as prepare_data
    from trainer.data.errors import DataError
    from trainer.sources import PREPARED, refused, tokenizer_file

    check(config)
    data = config.data
    try:
        if data.text is not None:
            prepare_data(
                data.text,
                config.run_dir / PREPARED,
                vocab_size=data.tokenizer.vocab_size,
                vocab_file=data.tokenizer.vocab_file,
                merges_file=data.tokenizer.merges_file,
                progress=progress,
                workers=len(os.sched_getaffinity(0)),
            )
        elif not tokenizer_file(config).is_file():
            message = f"there is no {tokenizer_file(config)}; name data.tokenizer.vocab_file and merges_file, or build it"
            raise ConfigError([Problem("data.path", None, message)])
        _open_all(config)
    except DataError as error:
        raise refused(config, error) from None


def _open_all(config: Config) -> None:
    """Open what the ranks will open; a bad dataset is one message now instead of one per rank later."""
    from trainer.data.samples import open_split
    from trainer.sources import datasets, vocabulary

    vocabulary(config)
    open_split(datasets(config), config.data.split, "train", config.model.seq_len, config.seed)
    if config.data.split[1]:
        open_split(datasets(config), config.data.split, "valid", config.model.seq_len, config.seed)


def check(config: Config) -> None:
    """Refuse layouts that are not built yet. Raises ConfigError."""
    parallel = config.parallel
    problems = [
        Problem(f"parallel.{name}", size, "not in this version of the trainer; allowed: 1")
        for name, size in (("tp", parallel.tp), ("pp", parallel.pp))
        if size != 1
    ]
    if parallel.zero_stage == 3:
        problems.append(Problem("parallel.zero_stage", 3, "not in this version of the trainer; allowed: 1, 2"))
    if problems:
        raise ConfigError(problems)


def plan(config: Config) -> Mapping[str, Mapping[str, object]]:
    """What a rank holds and a checkpoint weighs, by title and name. Raises ConfigError like `prepare`."""
    from trainer.data.errors import DataError
    from trainer.shape import activation_bytes, flops_per_token, shape_of
    from trainer.sources import refused, tokenizer_file, vocabulary

    check(config)
    known = tokenizer_file(config).is_file()
    try:
        vocab = vocabulary(config) if known else config.data.tokenizer.vocab_size
    except DataError as error:
        raise refused(config, error) from None
    shape = shape_of(config, vocab)
    dp = layout(config, cpu_count=1, gpu_count=1).dp
    train = config.train
    compute = 2 if train.precision == "bf16" else 4
    shard = -(-shape.parameters // dp)
    activations = activation_bytes(shape, train.micro_batch_size, bytes_per_number=compute)
    tokens = train.global_batch_size * shape.seq_len
    arrays = 3 * shape.arrays + 1
    return {
        "model": {
            "parameters": f"{shape.parameters:,}",
            "vocabulary": f"{shape.vocab:,}" + ("" if known else " (once the tokenizer is trained)"),
            "FLOPs per token": f"{flops_per_token(shape):,}",
            "tokens": f"{tokens:,} a step, {tokens * train.steps:,} in all",
        },
        "memory per rank": {
            "parameters": f"{_mib(shard * 4)} of fp32 masters, {_mib(shape.parameters * compute)} to compute with",
            "gradients": _mib(shard * 4),
            "optimizer": _mib(shard * 8),
            "activations": f"{_mib(activations)} of a micro batch (estimate)",
        },
        "checkpoint": {
            "size": _mib(shape.parameters * 12),
            "files": f"{2 * arrays + 7} in {arrays} arrays",
            "every": f"{config.checkpoint.every_steps} steps",
        },
    }


def _mib(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"
