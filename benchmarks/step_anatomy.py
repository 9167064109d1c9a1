"""What a step of the trainer is made of, counted and not timed: on any machine, also on one without a GPU.

    python benchmarks/step_anatomy.py [KEY=VALUE ...] [--config FILE] [--ranks 1] [--save FILE] [--against FILE]

For a config (its sections model, parallel, train and optimizer, on random tokens; a small model without one) and a layout, of a
step of the first rank: operations, collectives with their bytes, what makes the host wait for the device, bytes by kind, graphs and
graph breaks where layers are compiled, and on a GPU its kernels. Beside it the same model in a plain loop over as many micro
batches, in one process without a mesh, and torchtitan's Llama of the same sizes in that loop, where it is installed. `--save` keeps
the counts, `--against` says what has changed since.

Operations are those that PyTorch dispatches, without views. Compiled layers are run as they are written while operations and bytes
are counted: what compiling saves shows in the kernels of a GPU.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import figures

sys.path.remove(str(Path(__file__).parent))  # where trainer.py would be the package `trainer`

import numpy as np
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

MEANING = "What a step is made of: operations, collectives, waits and bytes of the first rank, beside a plain loop."
SECTIONS = ("model", "parallel", "train", "optimizer")
SMALL: dict[str, dict[str, object]] = {
    "model": {"layers": 2, "hidden": 64, "heads": 4, "seq_len": 64, "vocab_size": 4096},
    "train": {"global_batch_size": 8, "micro_batch_size": 2, "precision": "bf16"},
}
WARM_UP = 2  # steps: lazy parts, the optimizer's state, what a pipeline tries out
TOKENS = 256  # that the random text has
MADE = "made in the step, at most, bytes"
RANK = "STEP_ANATOMY"  # in the environment of a rank: where its counts go

LLAMA = ("rope", "rmsnorm", "swiglu")  # positions, norms and MLP that torchtitan's has

READS = frozenset({"item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__", "__contains__"})

Counts = dict[str, int]


class Reads(TorchFunctionMode):
    """Counts what reads a tensor, which waits for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.reading = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") not in READS or self.reading:
            return func(*args, **(kwargs or {}))
        self.count, self.reading = self.count + 1, True
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.reading = False


class Counted(TorchDispatchMode):
    """Counts what is dispatched in it, and the bytes of tensors that are made in it while they are there."""

    def __init__(self, reads: Reads) -> None:
        super().__init__()
        self.operations = self.waits = self.most = 0
        self.collectives: Counter[str] = Counter()
        self._reads = reads
        self._now = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not any(isinstance(each, DTensor) for each in tree_leaves((args, kwargs))):  # which come again as their local parts
            self._count(func, args, kwargs or {})
            self._hold(args, kwargs, result)
        return result

    def _count(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        namespace, _, name = func.name().partition("::")
        if namespace == "c10d":
            kind = name.strip("_").partition(".")[0]
            self.collectives[f"{kind}, times"] += 1
            whole = max(sum(x.nbytes for x in tree_leaves(arg) if isinstance(x, Tensor)) for arg in args)
            self.collectives[f"{kind}, bytes"] += whole
        elif "_local_scalar_dense" in name or name == "nonzero" or crosses(name, args, kwargs):
            self.waits += not self._reads.reading
        elif not any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns):
            self.operations += 1

    def _hold(self, args: Any, kwargs: Any, result: Any) -> None:
        """Count the memory of tensors that are new, until it is given back."""
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for each in tree_leaves(result):
            if not isinstance(each, Tensor) or isinstance(each, DTensor):
                continue
            storage = each.untyped_storage()
            if storage._cdata not in given | self._known:
                self._known.add(storage._cdata)
                self._now += storage.nbytes()
                weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        self.most = max(self.most, self._now)

    def _gone(self, which: int, size_bytes: int) -> None:
        self._known.discard(which)
        self._now -= size_bytes


def crosses(name: str, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation copies to another device, and waits for it."""
    if name == "_to_copy":
        return kwargs.get("device") not in (None, args[0].device) and not kwargs.get("non_blocking")
    return name == "copy_" and args[0].device != args[1].device and not (args[2:] and args[2])


def counted(step: Callable[[], object]) -> Counts:
    """Of one step."""
    with Reads() as reads, Counted(reads) as counts:
        step()
    most = {MADE: counts.most}
    return {"operations": counts.operations, "waits of the host": reads.count + counts.waits, **counts.collectives, **most}


def compiled(step: Callable[[], object], device: torch.device) -> Counts:
    """Graphs and breaks so far, and on a GPU the kernels of one more step and its waits, as the profiler sees them."""
    from torch._dynamo.utils import counters

    found = {"graphs": counters["stats"]["unique_graphs"], "graph breaks": sum(counters["graph_break"].values())}
    if device.type != "cuda":
        return found
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        step()
    names = [event.name for event in profiled.events()]
    on_gpu = [event for event in profiled.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    waits = sum("Synchronize" in name and name.startswith("cuda") for name in names)
    return {**found, "kernels of the GPU": len(on_gpu), "waits in CUDA": waits}


# -- contestants ---------------------------------------------------------------------------------------------------------


def of_trainer(config: Any) -> Counts:
    """This rank's counts of the trainer."""
    from resilient import worker
    from trainer.loop import Trainer

    made = Trainer(config, worker.init())
    gradients: list[int] = []
    whole = made.update.step

    def step(*args: Any) -> Any:
        parameters = [each for stage in made.stages for each in stage.parameters()]
        gradients.append(sum(local(each.grad).nbytes for each in parameters if each.grad is not None))
        return whole(*args)

    made.update.step = step  # type: ignore[method-assign]
    for _ in range(WARM_UP):
        made._step()
    found = compiled(made._step, made.device)
    found |= counted(made._step)
    made.ahead.close()
    weights = [each for stage in made.stages for each in stage.parameters()]
    return found | kept(weights, made.optimizer) | {"gradients, bytes": gradients[-1]}


def of_plain_loop(config: Any) -> Counts:
    """The same model as a person would train it."""
    from trainer.model import GPT
    from trainer.shape import shape_of
    from trainer.weights import initialize

    model = GPT(shape_of(config, config.model.vocab_size)).to(plain_device())
    initialize(model, config.seed)
    return of_loop(config, model)


def of_torchtitan(config: Any) -> Counts | str:
    """torchtitan's Llama of the same sizes; or why there is none."""
    from trainer.shape import shape_of

    shape = shape_of(config, config.model.vocab_size)
    if (shape.position, shape.norm, shape.mlp) != LLAMA or shape.bias or shape.dropout or shape.attention_dropout:
        return "has no such model"
    try:
        model = llama(shape)
    except ImportError as error:
        return f"not installed ({error})"
    return of_loop(config, model.to(plain_device()))


def llama(shape: Any) -> nn.Module:
    """With the kernel of `F.scaled_dot_product_attention`, for torchtitan's masks of documents are of other models."""
    from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
    from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock

    drawn, ones = {"weight": partial(nn.init.normal_, std=shape.init_std)}, {"weight": nn.init.ones_}
    dim, vocab = shape.hidden, shape.vocab
    norm = RMSNorm.Config(normalized_shape=dim, eps=shape.norm_eps, param_init=ones)
    attention = make_gqa_config(
        dim=dim,
        n_heads=shape.heads,
        n_kv_heads=shape.kv_heads,
        wqkv_param_init=drawn,
        wo_param_init=drawn,
        inner_attention=ScaledDotProductAttention.Config(),
        rope=ComplexRoPE.Config(dim=shape.head_dim, max_seq_len=shape.seq_len, theta=shape.rope_theta),
        fuse_qkv=True,
    )
    mlp = make_ffn_config(dim=dim, hidden_dim=shape.ffn_hidden, w1_param_init=drawn, w2w3_param_init=drawn)
    layer = Llama3TransformerBlock.Config(attention_norm=norm, ffn_norm=norm, attention=attention, feed_forward=mlp)
    model: Any = Llama3Model.Config(
        dim=dim,
        vocab_size=vocab,
        enable_weight_tying=shape.tied,
        tok_embeddings=Embedding.Config(num_embeddings=vocab, embedding_dim=dim, param_init=drawn),
        norm=norm,
        lm_head=Linear.Config(in_features=dim, out_features=vocab, param_init=drawn),
        layers=[layer] * shape.layers,
    ).build()
    model.init_states()
    return model


def plain_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def of_loop(config: Any, model: nn.Module) -> Counts:
    """A model that gives logits, trained in one process over the micro batches that the first rank has."""
    from resilient.worker import settle

    device = plain_device()
    layout = settle(config, int(os.environ["WORLD_SIZE"]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    micro, passes = config.train.micro_batch_size, layout.accumulation
    tokens = torch.randint(TOKENS, (micro * passes, config.model.seq_len + 1), device=device)
    gradients: list[int] = []

    def step() -> None:
        for part in tokens.split(micro):
            with torch.autocast(device.type, torch.bfloat16, enabled=config.train.precision == "bf16"):
                logits = model(part[:, :-1])
            loss = F.cross_entropy(logits.float().flatten(0, 1), part[:, 1:].flatten()) / passes
            loss.backward()
        gradients.append(sum(each.grad.nbytes for each in model.parameters() if each.grad is not None))
        float(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(WARM_UP):
        step()
    kernels = {name: count for name, count in compiled(step, device).items() if not name.startswith("graph")}
    return kernels | counted(step) | kept(list(model.parameters()), optimizer) | {"gradients, bytes": gradients[-1]}


def kept(weights: Sequence[Tensor], optimizer: torch.optim.Optimizer) -> Counts:
    """Bytes that are there between steps."""
    moments = [x for x in tree_leaves([list(state.values()) for state in optimizer.state.values()]) if isinstance(x, Tensor)]
    return {
        "weights, bytes": sum(local(each).nbytes for each in weights),
        "moments, bytes": sum(local(each).nbytes for each in moments),
    }


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# -- ranks ---------------------------------------------------------------------------------------------------------------


def write_config(directory: Path, given: Path | None, overrides: Sequence[str]) -> Path:
    """The config that is counted, and its data. Raises ConfigError where it is none."""
    from resilient.worker import load_config
    from trainer.data.indexed import IndexedWriter

    with IndexedWriter(directory / "random", np.dtype("<u2")) as writer:
        writer.add(np.random.default_rng(0).integers(0, TOKENS, 1 << 20).tolist())
        writer.commit({})
    told = SMALL if given is None else yaml.safe_load(given.read_text())
    sections = {name: dict(told.get(name) or {}) for name in SECTIONS}
    sections["model"].setdefault("vocab_size", SMALL["model"]["vocab_size"])
    sections["train"] = {key: each for key, each in sections["train"].items() if key not in ("steps", "samples", "tokens")}
    sections["train"] |= {"steps": 10**6, "eval_interval": 0}
    around = {
        "run_dir": str(directory / "run"),
        "data": {"path": str(directory / "random"), "split": [1, 0, 0]},
        "checkpoint": {"every_steps": 10**6},
        "logging": {"level": "error"},
    }
    path = directory / "config.yaml"
    path.write_text(yaml.safe_dump({**sections, **around}))
    path.write_text(yaml.safe_dump(load_config(path, list(overrides)).model_dump(mode="json", exclude_unset=True)))
    return path


def ranks(count: int, config: Path) -> tuple[Counts, Counts, Counts | str]:
    """Counts of the trainer on the first of so many ranks, of the plain loop, and of torchtitan, or why there are none."""
    found = config.with_name("found.json")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(count), __file__, str(config)]
    subprocess.run(command, check=True, env={**os.environ, RANK: str(found), "OMP_NUM_THREADS": "1"}, cwd=figures.ROOT)
    ours, plain, titan = json.loads(found.read_text())
    return ours, plain, titan


def rank(config_file: Path) -> None:
    """What a rank does."""
    from resilient.worker import decided_here, load_config

    config = decided_here(load_config(config_file, []))
    ours = of_trainer(config)
    if int(os.environ["RANK"]) == 0:
        Path(os.environ[RANK]).write_text(json.dumps([ours, of_plain_loop(config), of_torchtitan(config)]))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


# -- what is said --------------------------------------------------------------------------------------------------------


def figures_of(ours: Counts, plain: Counts) -> list[figures.Figure]:
    """In the order of the table: bytes last."""
    found = []
    for name in sorted({**plain, **ours}, key=lambda name: ("bytes" in name, "times" in name, name)):
        unit = "bytes" if "bytes" in name else ""
        value, peer = (figures.Spread.of([float(counts.get(name, 0))]) for counts in (ours, plain))
        found.append(figures.Figure(name, name, unit, value, "plain loop", peer))
    return found


def table(found: Sequence[figures.Figure], titan: Counts | str, before: figures.Result | None) -> str:
    """A row for each; with what it was before, where that was another number."""
    old = {each.name: each.value.median for each in before.figures} if before else {}
    rows = [(each.name, each.value.median, each.peer_value.median if each.peer_value else 0.0) for each in found]
    rows += [(name, 0.0, 0.0) for name in old if name not in {row[0] for row in rows}]
    lines = [f"{'':36}{'trainer':>16}{'plain loop':>16}{'torchtitan':>16}" + (f"{'before':>16}" if before else "")]
    for name, ours, plain in rows:
        was = old.get(name, 0.0)
        changed = f"{was:>16,.0f}" if before and f"{was:.6g}" != f"{ours:.6g}" else ""  # as many digits as files have
        theirs = f"{'-':>16}" if isinstance(titan, str) else f"{titan.get(name, 0):>16,}"
        lines.append(f"{name:36}{ours:>16,.0f}{plain:>16,.0f}{theirs}{changed}")
    return "\n".join([*lines, *([f"torchtitan: {titan}"] if isinstance(titan, str) else [])])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("override", nargs="*", metavar="KEY=VALUE", help="of the config")
    parser.add_argument("--config", type=Path, metavar="FILE")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--save", type=Path, metavar="FILE", help="keep the counts there")
    parser.add_argument("--against", type=Path, metavar="FILE", help="say what has changed since those were kept")
    args = parser.parse_args()
    before = figures.read(args.against) if args.against else None
    with tempfile.TemporaryDirectory(prefix="step-anatomy-") as scratch:
        ours, plain, titan = ranks(args.ranks, write_config(Path(scratch), args.config, args.override))
    found = figures_of(ours, plain)
    sys.stdout.write(f"{table(found, titan, before)}\n")
    if args.save:
        shown = [f"--ranks {args.ranks}", *args.override, *([args.config.name] if args.config else [])]
        figures.write(args.save, figures.measured(Path(__file__).stem, MEANING, found, shown, {}))


if __name__ == "__main__":
    if RANK in os.environ:
        rank(Path(sys.argv[1]))
    else:
        main()
