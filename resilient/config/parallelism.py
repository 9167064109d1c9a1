"""How a campaign is spread over its ranks: the layout with every `auto` settled, and every reason why it cannot be.

Pure. What is wrong is said with the key, and with the nearest values that work.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from resilient.config.dealing import ROUNDS, Dealing
from resilient.config.errors import ConfigError, Problem
from resilient.config.schema import Config

Works = Callable[[int], bool]

REACH = 1 << 16  # of a search for the nearest value that works


@dataclass(frozen=True)
class Layout:
    """What a config comes to on given machines.

    Attributes:
        accumulation: micro batches of the full global batch that a replica has at the most.
        fuller: replicas, the first ones, that have as many; the others of `dp` have one less.
        longer: replicas, the first ones, that compute longer than the others; 0 where all have as many passes.
        dp_replicate: groups of data-parallel ranks that hold the same shards.
    """

    nodes: int
    procs_per_node: int
    world_size: int
    tp: int
    cp: int
    pp: int
    dp: int
    virtual_stages: int
    micro_batch_size: int
    accumulation: int
    fuller: int
    longer: int
    threads_per_proc: int
    dp_replicate: int = 1

    @property
    def dp_shard(self) -> int:
        """Data-parallel ranks that shard the state among them."""
        return self.dp // self.dp_replicate

    def together(self, procs_per_node: int) -> int:
        """Ranks that hold the same shard and are on one node; all that do so where nodes do not hold the same as a whole."""
        group = self.dp_shard * self.cp * self.tp
        if group % procs_per_node == 0:
            return 1
        whole = procs_per_node % group == 0 and self.dp_replicate * group % procs_per_node == 0
        return procs_per_node // group if whole else self.dp_replicate

    @property
    def copies(self) -> int:
        """Nodes that hold the same, whatever one of them holds."""
        return self.dp_replicate // self.together(self.procs_per_node)


def layout(config: Config, *, cpu_count: int, gpu_count: int, apart: bool = False) -> Layout:
    """The layout on this machine, or on machines like this one.

    Args:
        cpu_count: cores of this machine.
        gpu_count: its GPUs.
        apart: every node is a machine of its own; else they share this one.

    Raises:
        ConfigError: the config cannot be spread over these ranks.
    """
    cluster = config.cluster
    on_gpu = gpu_count > 0 and cluster.device != "cpu"
    if cluster.device == "cuda" and gpu_count == 0:
        raise ConfigError([Problem("cluster.device", "cuda", "there is no GPU here; allowed: auto, cpu")])
    sharing = 1 if apart else cluster.computing
    if cluster.procs_per_node == "auto":
        procs = max(1, gpu_count // (1 if apart else cluster.slots)) if on_gpu else 1
    else:
        procs = cluster.procs_per_node
    if cluster.threads_per_proc != "auto":
        threads = cluster.threads_per_proc
    elif config.is_script and sharing * procs > 1:  # as many as torchrun would give it
        threads = 1
    else:
        threads = max(1, cpu_count // (sharing * procs))
    return _settle(config, cluster.computing, procs, threads)


def layouts(config: Config, largest: Layout) -> dict[int, Layout]:
    """The layouts that the run can go on with, by number of nodes: tp × cp × pp stays, and so does the global batch."""
    found = {largest.nodes: largest}
    fewer = with_fewer_replicas(with_shards(config, largest))
    for nodes in range(config.cluster.min_nodes, largest.nodes):
        with suppress(ConfigError):
            found[nodes] = _settle(fewer, nodes, largest.procs_per_node, largest.threads_per_proc)
    return found


def layouts_by_ranks(config: Config, largest: Layout) -> dict[int, Layout]:
    """The layouts that the run can go on with, by number of ranks: those of whole nodes, and where nodes may go on with fewer ranks
    (`cluster.min_procs_per_node`) those of any other number."""
    found = {each.world_size: each for each in layouts(config, largest).values()}
    least = config.cluster.min_procs_per_node or largest.procs_per_node
    fewer, one = with_fewer_replicas(with_shards(config, largest)), _model_ranks(config)
    if least < largest.procs_per_node:
        for ranks in range(one, largest.world_size, one):
            if ranks not in found and ranks >= least * config.cluster.min_nodes:
                with suppress(ConfigError):
                    found[ranks] = _settle(fewer, 1, ranks, largest.threads_per_proc)
    return found


def settle(config: Config, world_size: int, *, fewer: bool = False) -> Layout:
    """The layout on so many ranks, wherever they come from (torchrun starts as many as it is told).

    Args:
        fewer: nodes may have been lost, so that `parallel.dp` does not bind.

    Raises:
        ConfigError: the config cannot be spread over these ranks.
    """
    return _settle(with_fewer_replicas(config) if fewer else config, 1, world_size, 1)


def with_fewer_replicas(config: Config) -> Config:
    """The config for the nodes that are left: `parallel.dp` says how many replicas all nodes make.

    Groups that shard the state stay as large as they are, so that fewer of them go on without anything being sharded anew.
    """
    parallel, cluster = config.parallel, config.cluster
    shard, dp = parallel.dp_shard, parallel.dp
    if dp == "auto" and cluster.nodes != "auto" and cluster.procs_per_node != "auto":
        dp = cluster.nodes * cluster.procs_per_node // _model_ranks(config)
    if shard == "auto" and dp != "auto" and parallel.dp_replicate != "auto":
        shard = max(1, dp // parallel.dp_replicate)
    update = {"dp": "auto", "dp_shard": shard, "dp_replicate": "auto"}
    return config.model_copy(update={"parallel": parallel.model_copy(update=update)})


def with_shards(config: Config, layout: Layout) -> Config:
    """The config that names how many ranks shard the state, where some hold the same: with fewer nodes they are to be as many."""
    if layout.dp_replicate == 1:
        return config
    return config.model_copy(update={"parallel": config.parallel.model_copy(update={"dp_shard": layout.dp_shard})})


def dealing(config: Config, dp: int) -> Dealing:
    """How micro batches are dealt out to so many replicas."""
    parallel, ramped = config.parallel, config.train.batch_rampup is not None
    return Dealing(dp, parallel.pp, parallel.schedule, parallel.zero_stage, ramped, reduces_every(config))


def reduces_every(config: Config) -> bool:
    """Whether gradients are reduced in every backward pass; where that is left open, as far as the ZeRO stage asks for it."""
    parallel = config.parallel
    if parallel.reduce_gradients == "auto":
        return parallel.zero_stage > 1 and parallel.pp == 1
    return parallel.reduce_gradients == "every"


def _settle(config: Config, nodes: int, procs: int, threads: int) -> Layout:
    parallel, train = config.parallel, config.train
    found = list(_all(config, nodes * procs))
    if found:
        raise ConfigError(found)
    dp = nodes * procs // _model_ranks(config)
    dealt = dealing(config, dp)
    count = train.global_batch_size // train.micro_batch_size
    return Layout(
        nodes=nodes,
        procs_per_node=procs,
        world_size=nodes * procs,
        tp=parallel.tp,
        cp=parallel.cp,
        pp=parallel.pp,
        dp=dp,
        dp_replicate=_replicas(config, dp),
        virtual_stages=_virtual(config),
        micro_batch_size=train.micro_batch_size,
        accumulation=dealt.most(count),
        fuller=dealt.fuller(count),
        longer=dealt.longer(count),
        threads_per_proc=threads,
    )


def problems(config: Config) -> list[Problem]:
    """Everything that cannot be, as far as it can be known without the machine."""
    procs = config.cluster.procs_per_node
    nodes = config.cluster.nodes
    if procs == "auto" or nodes == "auto":
        dp = config.parallel.dp
        return [*_model(config), *(_hybrid(config, dp) if dp != "auto" else ())]
    return list(_all(config, nodes * procs))


def divides(whole: int) -> Works:
    """Whether a number divides `whole`."""
    return lambda value: whole % value == 0


def near(value: int, works: Works, *, step: int = 1) -> str:
    """The nearest values that work, in words: the next one below and the next one above, if they are within `REACH`."""
    below = next((each for each in range(value - 1, max(0, value - 1 - REACH), -1) if works(each)), None)
    above = next((each for each in range(value + 1, min(max(4096, 4 * value), value + REACH), step) if works(each)), None)
    return "nearest: " + (", ".join(str(each) for each in (below, above) if each is not None) or "none for a long way")


def _virtual(config: Config) -> int:
    parallel = config.parallel
    if parallel.pp == 1:  # there is no schedule
        return 1
    if parallel.virtual_stages != "auto":
        return parallel.virtual_stages
    return 2 if parallel.schedule == "interleaved_1f1b" else 1


def _replicas(config: Config, dp: int) -> int:
    """Groups of data-parallel ranks that hold the same shards."""
    shard, replicate = config.parallel.dp_shard, config.parallel.dp_replicate
    if replicate != "auto":
        return replicate
    return dp // shard if shard != "auto" and dp % shard == 0 else 1


def _hybrid(config: Config, dp: int) -> Iterator[Problem]:
    """What hybrid sharding must come to."""
    shard, replicate = config.parallel.dp_shard, config.parallel.dp_replicate
    if replicate == "auto":
        return
    if dp % replicate:
        nearest = near(replicate, divides(dp))
        yield Problem("parallel.dp_replicate", replicate, f"does not divide dp = {dp}; {nearest}")
    elif shard != "auto" and shard * replicate != dp:
        groups = f", or dp_replicate {dp // shard}" if dp % shard == 0 else ""
        message = f"× dp_replicate {replicate} is not dp = {dp}; allowed: {dp // replicate}, or auto{groups}"
        yield Problem("parallel.dp_shard", shard, message)


def _model_ranks(config: Config) -> int:
    return config.parallel.tp * config.parallel.cp * config.parallel.pp


def _all(config: Config, world: int) -> Iterator[Problem]:
    yield from _model(config)
    parallel, _train, cluster = config.parallel, config.train, config.cluster
    one = _model_ranks(config)
    inside = f"tp {parallel.tp} × cp {parallel.cp} × pp {parallel.pp}"
    procs = "" if cluster.procs_per_node == "auto" else f" (nodes {cluster.nodes} × procs_per_node {cluster.procs_per_node})"
    if world % one:
        nearest = near(world, lambda ranks: ranks % one == 0)
        yield Problem(
            "parallel", None, f"{inside} = {one} does not divide the world size {world}{procs}; world sizes that work, {nearest}"
        )
        return
    dp = world // one
    if parallel.dp not in ("auto", dp):
        message = f"{inside} × dp {parallel.dp} is not the world size {world}{procs}; allowed: {dp}, or auto"
        yield Problem("parallel.dp", parallel.dp, message)
        return
    yield from _hybrid(config, dp)
    if config.is_script:
        return  # its batches are its own
    yield from _batches(config, dp)


def _batches(config: Config, dp: int) -> Iterator[Problem]:
    """What the batches must come to: any number of replicas shares the micro batches of one."""
    parallel, train = config.parallel, config.train
    micro, pp = train.micro_batch_size, parallel.pp
    ramp = train.batch_rampup
    sizes = [("global_batch_size", train.global_batch_size)]
    if ramp is not None:
        sizes += [("batch_rampup.start", ramp.start), ("batch_rampup.increment", ramp.increment)]
    for key, size in sizes:
        if size % micro:
            message = f"must be a multiple of micro_batch_size = {micro}; {near(size, lambda each: each % micro == 0)}"
            yield Problem(f"train.{key}", size, message)
            return
    if dp > train.global_batch_size:
        message = f"has no sample for each of dp = {dp} replicas; allowed: at least {dp}, or fewer ranks"
        yield Problem("train.global_batch_size", train.global_batch_size, message)
    least = micro * pp
    if pp == 1 or parallel.schedule in ROUNDS:
        return
    for size in train.batches.sizes():
        if size < least:
            key = "train.global_batch_size" if size == train.global_batch_size else "train.batch_rampup.start"
            nearest = near(size, lambda each: each % micro == 0 and each >= least)
            message = f"gives {size // micro} micro batches, and {parallel.schedule} needs at least pp = {pp}; {nearest}"
            yield Problem(key, size, message)
            return


def _model(config: Config) -> Iterator[Problem]:
    """What the model's sizes allow."""
    model, parallel, train = config.model, config.parallel, config.train
    tp, cp, pp = parallel.tp, parallel.cp, parallel.pp
    if tp > 1:
        if model.heads % tp or model.hidden % tp:
            fits = near(tp, lambda size: model.heads % size == 0 and model.hidden % size == 0)
            yield Problem("parallel.tp", tp, f"must divide model.heads = {model.heads} and model.hidden = {model.hidden}; {fits}")
        elif model.ffn_hidden != "auto" and model.ffn_hidden % tp:
            nearest = near(model.ffn_hidden, lambda size: size % tp == 0)
            yield Problem("model.ffn_hidden", model.ffn_hidden, f"must be a multiple of parallel.tp = {tp}; {nearest}")
        elif model.ffn_hidden == "auto" and model.ffn % tp:
            nearest = near(model.ffn, lambda size: size % tp == 0)
            message = f"{model.ffn} is not a multiple of parallel.tp = {tp}; give it, {nearest}"
            yield Problem("model.ffn_hidden", "auto", message)
        elif parallel.sequence_parallel and (model.seq_len // cp) % tp:
            nearest = near(model.seq_len, lambda length: length % (cp * tp) == 0)
            message = f"must be a multiple of tp × cp = {tp * cp} for sequence_parallel; {nearest}"
            yield Problem("model.seq_len", model.seq_len, message)
        if parallel.async_tp and not parallel.sequence_parallel:
            yield Problem("parallel.async_tp", True, "exchanges parts of the sequence; allowed: false, or sequence_parallel: true")
        elif parallel.async_tp and pp > 1 and parallel.schedule == "zero_bubble":
            message = "zero_bubble splits the backward pass, and would exchange everything in both halves; allowed: false"
            yield Problem("parallel.async_tp", True, message)
    yield from _context(config)
    stages = pp * _virtual(config)
    if stages > model.layers:
        fits = f"allowed: at most {model.layers // _virtual(config)}"
        yield Problem("parallel.pp", pp, f"{stages} stages need as many layers, and model.layers is {model.layers}; {fits}")
    elif parallel.pp_layers != "auto":
        given = parallel.pp_layers
        if len(given) != stages:
            there = f"pp × virtual_stages are {stages}" if pp > 1 else "without a pipeline there is 1"
            yield Problem("parallel.pp_layers", given, f"names {len(given)} stages; {there}")
        elif sum(given) != model.layers:
            yield Problem("parallel.pp_layers", given, f"sums to {sum(given)}, and model.layers is {model.layers}")
    if parallel.schedule in ("gpipe", "1f1b") and _virtual(config) > 1:
        message = f"{parallel.schedule} has one stage per rank; allowed: 1, or the schedules interleaved_1f1b, zero_bubble"
        yield Problem("parallel.virtual_stages", _virtual(config), message)
    if parallel.schedule == "interleaved_1f1b" and pp > 1 and _virtual(config) < 2:
        yield Problem("parallel.virtual_stages", _virtual(config), "interleaved_1f1b needs at least 2; with one it is 1f1b")
    if parallel.schedule == "zero_bubble" and pp > 1 and parallel.zero_stage == 3:
        message = "zero_bubble needs the parameters between the halves of a backward pass; allowed: 1, 2"
        yield Problem("parallel.zero_stage", 3, message)

    if train.compile is True and (refusal := against_compiling(config)) is not None:
        yield Problem("train.compile", True, f"{refusal}; allowed: auto, false")


def against_compiling(config: Config) -> str | None:
    """Why layers cannot be compiled on this layout; None: they can."""
    parallel = config.parallel
    if parallel.pp > 1 and parallel.schedule == "zero_bubble":
        return "zero_bubble splits the backward pass, which compiled layers cannot"
    if parallel.tp > 1:
        return "with parallel.tp > 1 compiled layers would be given wrong gradients by PyTorch's DTensor"
    return None


def _context(config: Config) -> Iterator[Problem]:
    model, parallel, data = config.model, config.parallel, config.data
    cp = parallel.cp
    if cp == 1:
        return
    if config.cluster.device == "cpu":
        yield Problem("parallel.cp", cp, "PyTorch's context parallelism has no kernels for CPUs; allowed: 1")
    if model.seq_len % (2 * cp):
        nearest = near(model.seq_len, lambda length: length % (2 * cp) == 0)
        yield Problem("model.seq_len", model.seq_len, f"must be a multiple of 2 × parallel.cp = {2 * cp}; {nearest}")
    for key, value, wrong in (
        ("model.position", model.position, model.position == "alibi"),
        ("model.attention", model.attention, model.attention in ("math", "flash_attn", "flash_attn_3")),
        ("data.mask_documents", True, data.mask_documents),
        ("model.attention_dropout", model.attention_dropout, model.attention_dropout > 0),
        ("parallel.pp", parallel.pp, parallel.pp > 1),
    ):
        if wrong:
            yield Problem(key, value, "does not go together with context parallelism (parallel.cp > 1)")
