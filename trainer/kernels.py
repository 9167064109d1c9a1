"""Which attention kernel computes: what runs here, what is fastest at the real shapes, and what a campaign has found before.

Owns the choice; `trainer.attention` computes. A campaign on GPUs keeps what it found in its run directory: two timings of the same
kernels differ, and a restart with another kernel would round otherwise.
"""

import json
import logging
import os
import statistics
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl

from resilient.worker import Config, ConfigError, Layout, Problem
from trainer.attention import Apart, Core, Kernel
from trainer.data.bounds import Documents
from trainer.device import Meter, meter_of
from trainer.parallel.tensor import kv_shares
from trainer.shape import GPTShape

log = logging.getLogger(__name__)

FILE = "attention.json"  # of the run directory
ON_GPUS = (Kernel.FLASH_ATTN_3, Kernel.SDPA_CUDNN, Kernel.FLASH_ATTN, Kernel.SDPA_FLASH, Kernel.SDPA_EFFICIENT)
ROUNDS, PASSES = 5, 4  # medians are compared, of rounds in which the kernels take turns
NEAR = 0.02  # a kernel that is slower by no more than that, and stands before the fastest one, is taken

# What kernels raise where they do not run: PyTorch's RuntimeError and ValueError; packages also assert, lack parts of
# themselves, or were built with other arguments.
REFUSALS = (RuntimeError, ValueError, ImportError, AssertionError, AttributeError, TypeError)

_in_place: set[str] = set()  # what has taken the place of PyTorch's own flash kernel in this process

_ran: "set[tuple[Kernel, Work]]" = set()  # what layers have computed with in this process


@dataclass(frozen=True)
class Work:
    """What one layer's attention computes on a rank: all that the choice depends on."""

    device: str
    torch: str
    dtype: str
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    seq: int
    alibi: bool
    dropout: float
    documents: bool
    deterministic: bool


def work_of(config: Config, shape: GPTShape, layout: Layout, device: torch.device, dtype: torch.dtype) -> Work:
    """That of a campaign's ranks."""
    shares = kv_shares(shape, layout.tp, 0)
    even = len({queries for _, queries in shares}) == 1  # else each head of queries gets keys and values of its own
    return Work(
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        torch=torch.__version__,
        dtype=str(dtype).removeprefix("torch."),
        batch=config.train.micro_batch_size,
        heads=shape.heads // layout.tp,
        kv_heads=len(shares) if even else shape.heads // layout.tp,
        head_dim=shape.head_dim,
        seq=shape.seq_len // layout.cp,
        alibi=shape.position == "alibi",
        dropout=shape.attention_dropout,
        documents=config.data.mask_documents,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )


def choose(wanted: str, shape: GPTShape, device: torch.device, dtype: torch.dtype, *, documents: bool = False) -> Kernel:
    """The kernel that is asked for by name, or for `auto` the first one that runs; each is tried out on what it must do.

    Args:
        documents: whether the documents of a sample are masked from each other.

    Raises:
        ConfigError: a kernel was asked for by name, and does not run here.
    """
    if wanted == "math":
        return use(Kernel.MATH)
    automatic = [Kernel.FLASH_ATTN, Kernel.SDPA_FLASH, Kernel.SDPA_EFFICIENT]
    # On CPUs a short sample will do: no kernel of theirs depends on its length, and a long one would be felt.
    trial = Trial(shape, device, dtype, documents=documents, seq=shape.seq_len if device.type == "cuda" else 16)
    for kernel in automatic if wanted == "auto" else [Kernel(wanted)]:
        reason = refusal(kernel, trial)
        if reason is None:
            return use(kernel)
        if wanted != "auto":
            message = f"this kernel does not run here ({reason}); allowed: auto, math"
            raise ConfigError([Problem("model.attention", wanted, message)])
        if device.type == "cuda" or kernel is Kernel.SDPA_FLASH:
            level = logging.INFO if reason.startswith(ModuleNotFoundError.__name__) else logging.WARNING  # a package is no must
            log.log(level, "%s does not run here (%s); trying the next kernel", kernel.value, reason)
    return use(Kernel.MATH)


def settle(config: Config, shape: GPTShape, layout: Layout, device: torch.device, dtype: torch.dtype) -> Kernel:
    """The kernel for all ranks of a campaign, which call this together: for `auto` on GPUs the fastest of those that run.

    Raises:
        ConfigError: a kernel was asked for by name, and does not run here.
    """
    documents = config.data.mask_documents
    if config.model.attention != "auto" or device.type != "cuda":
        return choose(config.model.attention, shape, device, dtype, documents=documents)
    work = work_of(config, shape, layout, device, dtype)
    heads = (work.heads, work.kv_heads)
    trial = Trial(shape, device, dtype, documents=documents, batch=work.batch, seq=work.seq, heads=heads)
    # The package's functions are not what PyTorch's context parallelism passes keys and values around for.
    known = ON_GPUS if layout.cp == 1 else (Kernel.SDPA_CUDNN, Kernel.SDPA_FLASH)
    return use(decide(config.run_dir / FILE, work, trial, known, meter_of(device)))


def foreseen(config: Config, shape: GPTShape, layout: Layout, device: torch.device, dtype: torch.dtype) -> Kernel:
    """The kernel that ranks of the campaign use by now, as one process can tell. Raises ConfigError like `settle`."""
    if config.model.attention == "auto" and device.type == "cuda":
        found = remembered(config.run_dir / FILE, work_of(config, shape, layout, device, dtype))
        if found is not None:
            return use(found)
    return choose(config.model.attention, shape, device, dtype, documents=config.data.mask_documents)


def ran(kernel: Kernel, config: Config, shape: GPTShape, layout: Layout, device: torch.device, dtype: torch.dtype) -> None:
    """Say that layers of a campaign have computed with a kernel in this process, which need not be tried out here again."""
    _ran.add((kernel, work_of(config, shape, layout, device, dtype)))


def decide(place: Path, work: Work, trial: "Trial", known: Sequence[Kernel], meter: Meter) -> Kernel:
    """What rank 0 finds in `place`, or else by trying and timing, for all ranks."""
    kernel = Kernel.MATH
    if dist.get_rank() == 0:
        found = remembered(place, work)
        known_to_run = found is None or found is Kernel.MATH or (found, work) in _ran
        if found is not None and not known_to_run and (reason := refusal(found, trial)) is not None:
            log.warning("%s was chosen before, and does not run here any more (%s)", found.value, reason)
            found = None
        kernel = found or _found_out(place, work, trial, known, meter)
    number = torch.tensor([list(Kernel).index(kernel)])  # of the CPU, whose group is there with any device
    dist.broadcast(number, 0)
    return list(Kernel)[int(number)]


def _found_out(place: Path, work: Work, trial: "Trial", known: Sequence[Kernel], meter: Meter) -> Kernel:
    reasons = {kernel: refusal(kernel, trial) for kernel in known}
    for kernel, reason in reasons.items():
        if reason is not None:
            log.info("%s does not run here: %s", kernel.value, reason)
    running = [kernel for kernel, reason in reasons.items() if reason is None]
    seconds = timed(running, trial, meter) if len(running) > 1 else dict.fromkeys(running, 0.0)
    kernel = quickest(seconds)
    log.info("attention by %s; ms a layer: %s", kernel.value, {each.value: round(1e3 * s, 3) for each, s in seconds.items()})
    remember(place, work, kernel, seconds)
    return kernel


def quickest(seconds: Mapping[Kernel, float]) -> Kernel:
    """The first one that is as good as the fastest; without any, the explicit formula. Pure."""
    least = min(seconds.values(), default=0.0)
    return next((kernel for kernel, each in seconds.items() if each <= least * (1 + NEAR)), Kernel.MATH)


def timed(kernels: Sequence[Kernel], trial: "Trial", meter: Meter) -> dict[Kernel, float]:
    """Seconds of a forward and backward pass of each."""
    found: dict[Kernel, list[float]] = {kernel: [] for kernel in kernels}
    for _ in range(ROUNDS):
        for kernel in kernels:
            use(kernel)
            trial.run(kernel)  # whatever the first one sets up
            first = meter.mark()
            for _ in range(PASSES):
                trial.run(kernel)
            last = meter.mark()
            meter.wait(last)
            found[kernel].append(meter.seconds(first, last) / PASSES)
    return {kernel: statistics.median(each) for kernel, each in found.items()}


def refusal(kernel: Kernel, trial: "Trial") -> str | None:
    """Why a kernel cannot do what is asked of it here; None: it can."""
    if kernel not in (Kernel.SDPA_FLASH, Kernel.MATH) and trial.device.type != "cuda":
        return "this kernel is for CUDA"
    try:
        use(kernel)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they say why at length; the error is enough
            trial.run(kernel)
    except REFUSALS as error:
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    return None


def use(kernel: Kernel) -> Kernel:
    """Have PyTorch's flash attention computed by FlashAttention-3 if that is the kernel, else by what it brings along."""
    wanted = "FA3" if kernel is Kernel.FLASH_ATTN_3 else None
    if wanted is not None and not _in_place:
        activate_flash_attention_impl(wanted)
        _in_place.add(wanted)
    if wanted is None and _in_place:
        restore_flash_attention_impl()
        _in_place.clear()
    return kernel


class Trial:
    """One forward and backward pass of attention, of a sample of 16 tokens if nothing else is said.

    Args:
        heads: of queries, and of keys and values; None: the whole model's.
    """

    def __init__(
        self,
        shape: GPTShape,
        device: torch.device,
        dtype: torch.dtype,
        *,
        documents: bool = False,
        batch: int = 1,
        seq: int = 16,
        heads: tuple[int, int] | None = None,
    ) -> None:
        self.device, self._shape, self._dtype = device, shape, dtype
        self._documents, self._batch, self._seq = documents, batch, seq
        queries, keys = heads or (shape.heads, shape.kv_heads)
        self._heads = (queries, keys, keys)
        self._inputs: list[Tensor] | None = None

    def run(self, kernel: Kernel) -> None:
        """Raises whatever the kernel does where it does not run. The random numbers of the training are left as they were."""
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            self._run(kernel)

    def _run(self, kernel: Kernel) -> None:
        core = Core(self._shape, kernel)
        if self._inputs is None:  # as projections leave them: heads side by side
            sizes = [(self._batch, self._seq, heads, self._shape.head_dim) for heads in self._heads]
            made = [torch.randn(each, device=self.device, dtype=self._dtype) for each in sizes]
            self._inputs = [each.transpose(1, 2).requires_grad_() for each in made]
        apart = None
        if self._documents:
            one = Documents.of(torch.zeros(self._batch, self._seq, dtype=torch.int64))
            one = one._replace(numbers=one.numbers.to(self.device), starts=one.starts.to(self.device))
            apart = Apart.of(one, kernel, self._dtype)
        torch.autograd.grad(core(*self._inputs, apart).sum(), self._inputs)


# -- what a campaign remembers -------------------------------------------------------------------------------------------


def remembered(place: Path, work: Work) -> Kernel | None:
    """What was chosen for this work; None: nothing, or it cannot be read."""
    try:
        found = json.loads(place.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    match found:
        case {"work": known, "kernel": str(name)} if known == asdict(work) and name in {each.value for each in Kernel}:
            return Kernel(name)
        case _:
            return None


def remember(place: Path, work: Work, kernel: Kernel, seconds: Mapping[Kernel, float]) -> None:
    """Keep a choice, whole or not at all."""
    times = {each.value: found for each, found in seconds.items()}
    place.parent.mkdir(parents=True, exist_ok=True)
    new = place.with_name(f".{place.name}.{os.getpid()}")
    new.write_text(json.dumps({"work": asdict(work), "kernel": kernel.value, "seconds": times}, indent=1))
    new.replace(place)
