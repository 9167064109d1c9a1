"""What must fit together in a config, across its sections. Pure: a config to a list of problems."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from resilient.config.errors import ConfigError, Problem
from resilient.config.schema import Config


@dataclass(frozen=True)
class Layout:
    """What a config comes to on given machines."""

    nodes: int
    procs_per_node: int
    world_size: int
    tp: int
    pp: int
    dp: int
    micro_batch_size: int
    accumulation: int
    threads_per_proc: int


def check(config: Config) -> list[Problem]:
    """Everything that does not fit, as far as it can be known without the machine."""
    return [
        *_batch(config),
        *_model(config),
        *_optimizer(config),
        *_data(config),
        *_checkpoint(config),
        *_cluster(config),
        *_not_yet(config),
    ]


def layout(config: Config, *, cpu_count: int, gpu_count: int) -> Layout:
    """The layout with every `auto` settled.

    Args:
        cpu_count: cores of this machine.
        gpu_count: its GPUs.

    Raises:
        ConfigError: ranks and batch do not come out even.
    """
    cluster, parallel, train = config.cluster, config.parallel, config.train
    on_gpu = gpu_count > 0 and cluster.device != "cpu"
    if cluster.device == "cuda" and gpu_count == 0:
        raise ConfigError([Problem("cluster.device", "cuda", "there is no GPU here; allowed: auto, cpu")])
    if cluster.procs_per_node == "auto":
        procs = max(1, gpu_count // cluster.nodes) if on_gpu else 1
    else:
        procs = cluster.procs_per_node
    world = cluster.nodes * procs
    one = parallel.tp * parallel.pp
    if world % one:
        message = f"tp × pp = {one} does not divide the world size {world} (nodes {cluster.nodes} × procs_per_node {procs})"
        raise ConfigError([Problem("parallel", None, message)])
    dp = world // one if parallel.dp == "auto" else parallel.dp
    if one * dp != world:
        message = (
            f"tp {parallel.tp} × pp {parallel.pp} × dp {dp} = {one * dp} is not the world size {world} "
            f"(nodes {cluster.nodes} × procs_per_node {procs}); allowed: {world // one}, or auto"
        )
        raise ConfigError([Problem("parallel.dp", parallel.dp, message)])
    if train.global_batch_size % (train.micro_batch_size * dp):
        raise ConfigError([_uneven_batch(config, dp)])
    threads = max(1, cpu_count // world) if cluster.threads_per_proc == "auto" else cluster.threads_per_proc
    return Layout(
        nodes=cluster.nodes,
        procs_per_node=procs,
        world_size=world,
        tp=parallel.tp,
        pp=parallel.pp,
        dp=dp,
        micro_batch_size=train.micro_batch_size,
        accumulation=train.global_batch_size // (train.micro_batch_size * dp),
        threads_per_proc=threads,
    )


def _uneven_batch(config: Config, dp: int) -> Problem:
    unit = config.train.micro_batch_size * dp
    message = f"must be a multiple of micro_batch_size × dp = {config.train.micro_batch_size} × {dp} = {unit}"
    return Problem("train.global_batch_size", config.train.global_batch_size, message)


def _batch(config: Config) -> Iterator[Problem]:
    cluster, parallel = config.cluster, config.parallel
    if cluster.procs_per_node == "auto":
        return
    world, one = cluster.nodes * cluster.procs_per_node, parallel.tp * parallel.pp
    ranks = f"nodes {cluster.nodes} × procs_per_node {cluster.procs_per_node} = {world}"
    if world % one:
        yield Problem("parallel", None, f"tp {parallel.tp} × pp {parallel.pp} does not divide the world size, {ranks}")
        return
    dp = world // one if parallel.dp == "auto" else parallel.dp
    if one * dp != world:
        yield Problem(
            "parallel.dp", dp, f"tp {parallel.tp} × pp {parallel.pp} × dp must be {ranks}; allowed: {world // one}, or auto"
        )
    elif config.train.global_batch_size % (config.train.micro_batch_size * dp):
        yield _uneven_batch(config, dp)


def _divides(key: str, value: int, of: str, whole: int) -> Iterator[Problem]:
    if whole % value:
        yield Problem(key, value, f"must divide {of} = {whole}")


def _model(config: Config) -> Iterator[Problem]:
    model, parallel = config.model, config.parallel
    yield from _divides("model.heads", model.heads, "model.hidden", model.hidden)
    if model.hidden % model.heads == 0 and (model.hidden // model.heads) % 2:
        message = f"hidden / heads = {model.hidden // model.heads} must be even for rotary positions"
        yield Problem("model.heads", model.heads, message)
    if model.kv_heads != "auto":
        yield from _divides("model.kv_heads", model.kv_heads, "model.heads", model.heads)
    yield from _divides("parallel.tp", parallel.tp, "model.heads", model.heads)
    if parallel.pp > model.layers:
        yield Problem("parallel.pp", parallel.pp, f"must be at most model.layers = {model.layers}")


def _optimizer(config: Config) -> Iterator[Problem]:
    optimizer = config.optimizer
    if optimizer.min_lr > optimizer.lr:
        yield Problem("optimizer.min_lr", optimizer.min_lr, f"must be at most optimizer.lr = {optimizer.lr}")
    samples = config.train.steps * config.train.global_batch_size
    if optimizer.decay_samples != "auto":
        samples = optimizer.decay_samples
    if optimizer.schedule == "cosine" and optimizer.warmup_samples >= samples:
        message = f"must be below the {samples} samples after which the learning rate has decayed"
        yield Problem("optimizer.warmup_samples", optimizer.warmup_samples, message)


def _data(config: Config) -> Iterator[Problem]:
    data = config.data
    if data.split[0] == 0:
        yield Problem("data.split", list(data.split), "the first share, for training, must be above 0")
    if data.text is not None and data.path is not None:
        yield Problem("data.path", None, "give either data.text or data.path, not both")
    if data.text is None and data.path is None:
        yield Problem("data.text", None, "give either data.text (auto, or a list of files) or data.path")
    if data.text == []:
        yield Problem("data.text", None, "names no file; allowed: auto, or a list of files")
    if data.path == []:
        yield Problem("data.path", None, "names no dataset; allowed: a prefix, or a list of path and weight")
    vocab, merges = data.tokenizer.vocab_file, data.tokenizer.merges_file
    if (vocab is None) != (merges is None):
        missing = "merges_file" if merges is None else "vocab_file"
        yield Problem("data.tokenizer", None, f"vocab_file and merges_file go together; {missing} is missing")


def _checkpoint(config: Config) -> Iterator[Problem]:
    seen: set[str] = set()
    for number, tier in enumerate(config.checkpoint.tiers):
        if tier.name in seen:
            yield Problem(f"checkpoint.tiers.{number}.name", tier.name, "is the name of another tier already")
        seen.add(tier.name)


def _cluster(config: Config) -> Iterator[Problem]:
    if config.cluster.min_nodes > config.cluster.nodes:
        message = f"must be at most cluster.nodes = {config.cluster.nodes}"
        yield Problem("cluster.min_nodes", config.cluster.min_nodes, message)


def _not_yet(config: Config) -> Iterator[Problem]:
    """Keys whose work is not built yet: refused rather than ignored."""

    def refuse(key: str, value: Any, only: str) -> Problem:
        return Problem(key, value, f"not in this version; allowed: {only}")

    cluster = config.cluster
    if cluster.launcher == "slurm":
        yield refuse("cluster.launcher", "slurm", "auto, local")
    if cluster.spares:
        yield refuse("cluster.spares", cluster.spares, "0")
    if 1 < cluster.min_nodes < cluster.nodes:
        yield refuse("cluster.min_nodes", cluster.min_nodes, f"1, or cluster.nodes = {cluster.nodes}")
    tiers = config.checkpoint.tiers
    if len(tiers) > 1:
        yield refuse("checkpoint.tiers", f"{len(tiers)} tiers", "one tier, the durable one")
    for number, tier in enumerate(tiers):
        if tier.replicas:
            yield refuse(f"checkpoint.tiers.{number}.replicas", tier.replicas, "0")
        if tier.every_steps is not None:
            yield refuse(f"checkpoint.tiers.{number}.every_steps", tier.every_steps, "checkpoint.every_steps for the one tier")
    if config.resilience.link_grace_s != "auto":
        yield refuse("resilience.link_grace_s", config.resilience.link_grace_s, "auto")
