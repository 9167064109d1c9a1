"""What must fit together in a config, across its sections. Pure: a config to a list of problems."""

import math
from collections.abc import Iterator

from resilient.config.errors import Problem
from resilient.config.parallelism import divides, near, problems
from resilient.config.schema import Config
from resilient.config.sinks import SINKS
from resilient.config.timeouts import out_of_order

DEFAULT_WARMUP_SAMPLES = 320


def check(config: Config) -> list[Problem]:
    """Everything that does not fit, as far as it can be known without the machine."""
    return [
        *_model(config),
        *problems(config),
        *_samples(config),
        *_optimizer(config),
        *_data(config),
        *_checkpoint(config),
        *_cluster(config),
        *_network(config),
        *_slurm(config),
        *_logging(config),
        *_sinks(config),
        *_free_values("args", config.args),
        *_free_values("logging.sinks.others", config.logging.sinks.others),
        *out_of_order(config),
    ]


def _model(config: Config) -> Iterator[Problem]:
    model = config.model
    if model.hidden % model.heads:
        yield Problem(
            "model.heads", model.heads, f"must divide model.hidden = {model.hidden}; {near(model.heads, divides(model.hidden))}"
        )
    elif model.position == "rope" and (model.hidden // model.heads) % 2:
        message = f"hidden / heads = {model.hidden // model.heads} must be even for rotary positions"
        yield Problem("model.heads", model.heads, message)
    if model.kv_heads != "auto" and model.heads % model.kv_heads:
        message = f"must divide model.heads = {model.heads}; {near(model.kv_heads, divides(model.heads))}"
        yield Problem("model.kv_heads", model.kv_heads, message)


def _samples(config: Config) -> Iterator[Problem]:
    train = config.train
    if train.samples is not None and train.batches.steps(train.samples) != train.steps:
        message = (
            f"these samples are {train.batches.steps(train.samples)} steps, and train.steps is {train.steps}; give one of them"
        )
        yield Problem("train.samples", train.samples, message)


def _optimizer(config: Config) -> Iterator[Problem]:
    optimizer = config.optimizer
    if optimizer.min_lr > optimizer.lr:
        yield Problem("optimizer.min_lr", optimizer.min_lr, f"must be at most optimizer.lr = {optimizer.lr}")
    for what, tokens in (("warmup", optimizer.warmup_tokens), ("decay", optimizer.decay_tokens)):
        if tokens is not None and getattr(optimizer, f"{what}_samples") != "auto":
            yield Problem(f"optimizer.{what}_tokens", tokens, f"give either {what}_tokens or {what}_samples, not both")
    warmup, decay = spans(config)
    if optimizer.schedule != "constant" and warmup >= decay:
        key = "warmup_samples" if optimizer.warmup_tokens is None else "warmup_tokens"
        message = f"is {warmup} samples, and must be below the {decay} samples after which the learning rate has decayed"
        yield Problem(f"optimizer.{key}", getattr(optimizer, key), message)


def spans(config: Config) -> tuple[int, int]:
    """Warm-up, and the end of the decay, of the learning rate in samples."""
    optimizer, seq_len = config.optimizer, config.model.seq_len
    if optimizer.decay_tokens is not None:
        decay = optimizer.decay_tokens // seq_len
    elif optimizer.decay_samples != "auto":
        decay = optimizer.decay_samples
    else:
        decay = config.train.batches.consumed(config.train.steps)
    if optimizer.warmup_tokens is not None:
        return optimizer.warmup_tokens // seq_len, decay
    if optimizer.warmup_samples != "auto":
        return optimizer.warmup_samples, decay
    return min(DEFAULT_WARMUP_SAMPLES, decay // 10), decay


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
    tiers = config.checkpoint.tiers
    for number, tier in enumerate(tiers):
        key = f"checkpoint.tiers.{number}"
        if tier.name in seen:
            yield Problem(f"{key}.name", tier.name, "is the name of another tier already")
        seen.add(tier.name)
        if tier.every_s is not None and tier.every_steps is not None:
            yield Problem(f"{key}.every_s", tier.every_s, "give either every_s or every_steps, not both")
        if tier.replicas != "auto" and tier.replicas > 1:
            yield Problem(f"{key}.replicas", tier.replicas, "allowed: auto, 0, or 1 for a copy on another node")
        durable = number == len(tiers) - 1
        if durable and tier.replicas not in (0, "auto"):
            yield Problem(f"{key}.replicas", tier.replicas, "the last tier is shared by all nodes and needs none; allowed: 0, auto")
        if tier.keep_every is not None and not durable:
            yield Problem(f"{key}.keep_every", tier.keep_every, "only the last tier, the durable one, keeps checkpoints for good")


def _cluster(config: Config) -> Iterator[Problem]:
    domains = config.cluster.domains
    slots = config.cluster.slots
    if config.cluster.nodes == "auto":
        if domains is not None:
            yield Problem("cluster.domains", domains, "must name a domain for each node, so cluster.nodes must be a number")
        return
    if domains is not None and len(domains) != slots:
        spares = ", spares included" if config.cluster.spares else ""
        yield Problem("cluster.domains", domains, f"must name a failure domain for each of {slots} nodes{spares}")
    if config.cluster.min_nodes > config.cluster.nodes:
        message = f"must be at most cluster.nodes = {config.cluster.nodes}"
        yield Problem("cluster.min_nodes", config.cluster.min_nodes, message)
    least, procs = config.cluster.min_procs_per_node, config.cluster.procs_per_node
    if least is not None and procs != "auto" and least > procs:
        yield Problem("cluster.min_procs_per_node", least, f"must be at most cluster.procs_per_node = {procs}")


def _network(config: Config) -> Iterator[Problem]:
    network = config.network
    for name in ("ib_timeout", "ib_retries"):
        value = getattr(network, name)
        if network.link_down_s is not None and value is not None:
            yield Problem(f"network.{name}", value, "link_down_s chooses it; give either link_down_s or this")


def _slurm(config: Config) -> Iterator[Problem]:
    slurm = config.slurm
    limit_min = slurm.limits_min.get(slurm.partition or "")
    if slurm.time_min is not None and limit_min is not None and slurm.time_min > limit_min:
        yield Problem(
            "slurm.time_min", slurm.time_min, f"must be at most {limit_min}, the limit of the partition {slurm.partition}"
        )


def _logging(config: Config) -> Iterator[Problem]:
    window = config.logging.profile_steps
    if window is not None and window[1] < window[0]:
        yield Problem("logging.profile_steps", list(window), "the last step must not be before the first; allowed: [FIRST, LAST]")


def _sinks(config: Config) -> Iterator[Problem]:
    sinks, key = config.logging.sinks, "logging.sinks"
    if sinks.prometheus is not None and sinks.prometheus.file.suffix != ".prom":
        yield Problem(f"{key}.prometheus.file", sinks.prometheus.file, "must end with .prom: node_exporter reads no other files")
    if sinks.webhook is not None and (sinks.webhook.url is None) == (sinks.webhook.url_file is None):
        yield Problem(f"{key}.webhook.url", sinks.webhook.url, "give either url or url_file")
    for name in sinks.others:
        if name in SINKS:
            yield Problem(f"{key}.others.{name}", None, f"is one of the project's own: put it under {key}")


def _free_values(key: str, value: object) -> Iterator[Problem]:
    """Of values whose types nobody knows: what the run directory, in which they are kept as JSON has them, would turn into null."""
    if isinstance(value, dict):
        for name, each in value.items():
            yield from _free_values(f"{key}.{name}", each)
    elif isinstance(value, list):
        for number, each in enumerate(value):
            yield from _free_values(f"{key}.{number}", each)
    elif isinstance(value, float) and not math.isfinite(value):
        yield Problem(key, value, "a number here is finite; allowed: text in quotes, for the entry point to make a number of")
