"""How fast steps of the 800M model are: as a plain script, by this trainer, with long sequences; and what memory they take."""

import importlib.util
import json
import multiprocessing
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from gpu_report import Figure
from gpu_setting import Batch, Case, LeftOut, Setting
from plain_gpt import Size, plain_script

from resilient.lifeline import die_with_parent
from resilient.worker import Config, init, layout
from trainer.device import meter_of
from trainer.kernels import FILE
from trainer.memory import most
from trainer.shape import flops_per_token, peak_flops, shape_of

STEP = Batch(4, 8)  # the optimizer's step and FSDP's gathering are once a step; the example at world 1 has 128 micro batches
WARM_UP, MOST, LEAST, ENOUGH_S = 2, 10, 3, 4.0  # steps that are not measured, and that are: fewer where they take so long
AT_ONCE = 4
EAGER = ("train.compile=false",)
COMPILED = ("train.compile=true",)
SPEEDS: dict[str, tuple[Batch, tuple[str, ...], str]] = {
    "eager": (STEP, EAGER, "plain"),
    "compiled": (STEP, COMPILED, "plain compiled"),
    "compiled, micro batch 16": (Batch(16, 4), COMPILED, "compiled"),
    "compiled, math attention": (STEP, (*COMPILED, "model.attention=math"), "compiled"),
    "flash-attn": (STEP, (*COMPILED, "model.attention=flash_attn"), "compiled"),
    "2k tokens": (Batch(8, 2, 2048), COMPILED, ""),
    "4k tokens": (Batch(4, 2, 4096), COMPILED, "2k tokens"),
    "8k tokens": (Batch(2, 2, 8192), COMPILED, "2k tokens"),
    "16k tokens": (Batch(1, 2, 16384), COMPILED, "2k tokens"),
}
"""Of this trainer: a step, what else the config says, and the case that it is compared with. Attention is `auto` otherwise."""


def trained(name: str) -> Case:
    """A case of `SPEEDS`: this trainer, data and reports included."""
    batch, more, peer = SPEEDS[name]

    def case(setting: Setting) -> Iterator[Figure]:
        from trainer.loop import Trainer

        _needs(setting, more)
        trainer = Trainer(setting.config(_place(name), batch, *more), init())
        yield from _speed(setting, trainer._step, trainer.config, note=_attention(trainer.config), peer=peer, planned=True)

    return case


def plain(*, compiled: bool) -> Case:
    """What a person writes in an hour: fp32 weights, autocast, SDPA."""

    def case(setting: Setting) -> Iterator[Figure]:
        config = setting.config("plain", STEP)
        yield from _speed(setting, _plain(setting, config, compiled), config, note="without biases and tied embeddings")

    return case


def _plain(setting: Setting, config: Config, compiled: bool) -> Callable[[], None]:
    if compiled and setting.dry:
        _without_a_compiler()
    model, train = config.model, config.train
    accumulation = train.global_batch_size // train.micro_batch_size
    micro = train.micro_batch_size
    size = Size(model.layers, model.hidden, model.heads, model.seq_len, int(model.vocab_size), micro, accumulation)
    return plain_script(size, setting.device, compiled=compiled)


def kernels(setting: Setting) -> Iterator[Figure]:
    """Inductor's kernels of compiled cases, made by models of two layers into its cache on disk, some beside each other.

    So these cases do not wait ten seconds for them, and all of it fits into minutes. Not of those whose speed is compared most,
    for Inductor chooses by timing, and other cases run beside this one. How many were made, and the seconds.
    """
    from trainer.loop import Trainer

    context = multiprocessing.get_context("fork")
    few = {name: (replace(batch, accumulation=1), more) for name, (batch, more, _) in SPEEDS.items() if COMPILED[0] in more}
    for name in ("flash-attn", "compiled", "compiled, micro batch 16"):
        del few[name]
    if setting.dry:
        few = {"2k tokens": few["2k tokens"]}
    configs = {name: setting.config(_place(name), batch, *more, "model.layers=2") for name, (batch, more) in few.items()}
    configs["plain"] = setting.config("plain", replace(STEP, accumulation=1), "model.layers=2")
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = str(AT_ONCE)

    def make(name: str, config: Config, parent: int) -> None:
        die_with_parent(parent)
        if setting.dry:
            _without_a_compiler()
        if name == "plain":
            _plain(setting, config, compiled=True)()
        else:
            Trainer(config, init())._step()

    made, began = 0, time.monotonic()
    for start in range(0, len(configs), AT_ONCE):
        some = [*configs.items()][start : start + AT_ONCE]
        processes = [context.Process(target=make, args=(name, config, os.getpid())) for name, config in some]
        for each in processes:
            each.start()
        for each in processes:
            each.join()
            made += each.exitcode == 0
    yield setting.figure("made", "", made, f"of {len(configs)}, {AT_ONCE} at a time beside other cases")
    yield setting.figure("seconds", "s", time.monotonic() - began)


def _needs(setting: Setting, more: tuple[str, ...]) -> None:
    """Raises LeftOut where a case cannot be measured here."""
    if "model.attention=flash_attn" in more and (setting.dry or importlib.util.find_spec("flash_attn") is None):
        raise LeftOut("the flash-attn package runs on a GPU alone" if setting.dry else "flash-attn is not installed")
    if setting.dry and COMPILED[0] in more:
        _without_a_compiler()


def _without_a_compiler() -> None:
    """Graphs are captured, and run as they are: a dry run takes no C compiler, and none of its time."""
    whole = torch.nn.Module.compile

    def captured(module: torch.nn.Module, **more: Any) -> None:
        whole(module, **{**more, "backend": "eager"})

    torch.nn.Module.compile = captured  # type: ignore[method-assign,assignment]


def _place(name: str) -> str:
    """A run directory of its own, where the choice of attention's kernel is kept."""
    return re.sub(r"\W+", "-", f"speed {name}")


def _attention(config: Config) -> str:
    """Which kernel was taken, and what was measured of each."""
    try:
        found = json.loads((config.run_dir / FILE).read_text())
    except OSError:
        return f"attention: {config.model.attention}"
    times = ", ".join(f"{kernel} {1e3 * seconds:.3g} ms" for kernel, seconds in found["seconds"].items())
    return f"attention by {found['kernel']} (a layer, forward and backward: {times})"


def _speed(
    setting: Setting, step: Callable[[], None], config: Config, *, note: str, peer: str = "", planned: bool = False
) -> Iterator[Figure]:
    """Of steps of a model of this config. Args: peer: the case beside it; planned: `plan` says what memory it takes."""
    meter, speeds = meter_of(setting.device), list[float]()
    began = time.perf_counter()
    for number in range(WARM_UP):
        step()  # kernels are chosen and compiled
        if not number:
            meter.wait(meter.mark())
            first_s = time.perf_counter() - began
    meter.forget_peak()
    train = config.train
    tokens = train.global_batch_size * config.model.seq_len
    began = time.perf_counter()
    while len(speeds) < LEAST or (not setting.dry and len(speeds) < MOST and time.perf_counter() - began < ENOUGH_S):
        first = meter.mark()
        step()
        last = meter.mark()
        meter.wait(last)
        speeds.append(tokens / meter.seconds(first, last))
    peak = meter.peak_bytes() / 2**30
    shape = shape_of(config, int(config.model.vocab_size))
    flops = [speed * flops_per_token(shape) / 1e12 for speed in speeds]
    micro, count = train.micro_batch_size, train.global_batch_size // train.micro_batch_size
    whole = "" if (micro, count) != (STEP.micro, STEP.accumulation) else " (the example at world 1 has 128)"
    about = f"{count} micro batches of {micro} x {config.model.seq_len} tokens{whole}; {note}"
    yield setting.figure("speed", "tokens/s", speeds, about, peer=f"{peer}/speed" if peer else "")
    if planned:
        spread = layout(config, cpu_count=1, gpu_count=1)
        foreseen = most(config, shape, spread)[1].peak / 2**30
        yield setting.figure("memory", "GiB", peak, "the peak of a step", peer="the plan", peer_value=foreseen)
    else:
        yield setting.figure("memory", "GiB", peak, "the peak of a step")
    yield setting.figure("arithmetic", "TFLOP/s", flops, peer="matmul/bf16")
    if not setting.dry and (best := peak_flops(torch.cuda.get_device_name(), "bf16")) is not None:
        yield setting.figure("MFU", "%", [100e12 * each / best for each in flops], "of the maker's peak; the goal is 55")
    yield setting.figure("first step", "s", first_s, "kernels are chosen, compiled or read from the cache on disk")
