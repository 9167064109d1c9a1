"""What a person sees of a step: timers, speed, MFU, memory, profiles. Owns no state that training depends on."""

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict

import torch
from torch.profiler import ProfilerActivity, profile

from resilient import worker
from trainer.device import Meter, meter_of
from trainer.gradients import Found
from trainer.inspection import Inspected, Inspection
from trainer.state import Progress

log = logging.getLogger(__name__)


class Instruments:
    """Measures the steps of one rank; rank 0 reports.

    Args:
        flops_per_token: see `trainer.shape.flops_per_token`.
        peak_flops: of one device; None: MFU is not known.
        meter: of the device; None: what it has.
    """

    def __init__(
        self,
        config: worker.Config,
        context: worker.Context,
        device: torch.device,
        flops_per_token: int,
        peak_flops: float | None,
        meter: Meter | None = None,
    ) -> None:
        self._config, self._context, self._device = config, context, device
        self._flops_per_token, self._peak_flops = flops_per_token, peak_flops
        self._nvtx = config.logging.nvtx and device.type == "cuda"
        self._meter = meter or meter_of(device)
        self._timed = config.logging.timers and context.rank == 0
        self._spans: list[tuple[str, object, object]] = []  # name, and marks before and behind it
        self._began = time.perf_counter()
        self._profile: profile | None = None
        self._inspection: Inspection | None = None
        self._inspected: Inspected | None = None

    def start_step(self, step: int, inspect: Callable[[], Inspection] | None = None) -> None:
        """Step `step` (1-based) begins. Args: inspect: begins to look into it, if that is wanted of this step and rank."""
        self._inspected = None
        self._began = time.perf_counter()
        self._spans = []
        self._meter.forget_peak()  # or the first step's, with its kernels being tried out, would be all that is told
        window = self._config.logging.profile_steps
        wanted = window is not None and window[0] <= step <= window[1] and self._context.rank in self._config.logging.profile_ranks
        if wanted and self._profile is None:  # a restart may have begun within them
            gpu = [ProfilerActivity.CUDA] if self._device.type == "cuda" else []
            self._profile = profile(activities=[ProfilerActivity.CPU, *gpu], record_shapes=True, profile_memory=True)
            self._profile.start()
        wanted = inspect is not None and step == self._config.logging.inspect_step and self._context.rank == 0
        if inspect is not None and wanted and self._profile is None:  # there can be one profiler at a time
            self._inspection = inspect()

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time a phase of a step, and mark it for the profilers."""
        before = self._meter.mark() if self._timed else None
        if self._nvtx:
            torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]
        with torch.profiler.record_function(name):
            yield
        if self._nvtx:
            torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]
        if self._timed:
            self._spans.append((name, before, self._meter.mark()))

    def computed(self) -> None:
        """The step is computed, and its gradients are still there."""
        if self._inspection is not None:
            self._inspected, self._inspection = self._inspection.end(), None

    def report(self, found: Found, rate: float, size: int, progress: Progress, *, skipped: str | None) -> None:
        """The step is finished."""
        step_s = time.perf_counter() - self._began
        window = self._config.logging.profile_steps
        if window is not None and progress.step >= window[1]:
            self.close()
        if self._context.rank != 0:
            return
        switches, seq_len = self._config.logging, self._config.model.seq_len
        speed = size * seq_len / step_s
        achieved = speed * self._flops_per_token / self._context.world_size
        line: dict[str, object] = {
            "step": progress.step,
            "loss": _finite(found.loss),
            "grad_norm": _finite(found.norm),
            "lr": rate,
            "samples": progress.consumed_samples,
            "tokens": progress.consumed_samples * seq_len,
            "step_s": step_s,
            "tokens_per_s": speed,
            "mfu": achieved / self._peak_flops if self._peak_flops else None,
        }
        if skipped is not None:
            line["skipped"] = skipped
        if switches.batch_size:
            line["batch_size"] = size
        if switches.world_size:
            line["world_size"] = self._context.world_size
        if switches.timers:
            line |= self._timers()
        if switches.memory:
            line["memory_bytes"] = self._meter.peak_bytes()
        if self._inspected is not None:
            line["inspected"] = asdict(self._inspected)
        worker.report(line)
        if progress.step % switches.log_interval == 0 or skipped:
            log.info("step %d loss %r grad_norm %.4f lr %.3e %.0f tokens/s", progress.step, found.loss, found.norm, rate, speed)

    def left_out(self, progress: Progress) -> None:
        """The step is over, and nothing was computed."""
        if self._context.rank != 0:
            return
        so_far = {"samples": progress.consumed_samples, "tokens": progress.consumed_samples * self._config.model.seq_len}
        nothing = {"loss": None, "grad_norm": None, "step_s": time.perf_counter() - self._began, "skipped": "rolled_back"}
        worker.report({"step": progress.step, **nothing, **so_far})
        log.warning("step %d is left out: its data was bad before the roll-back and after it", progress.step)

    def close(self) -> None:
        """Write the profile, if one is being taken."""
        if self._profile is None:
            return
        profile, self._profile = self._profile, None
        profile.stop()
        directory = self._config.run_dir / "profile"
        path = directory / f"g{self._context.generation}-rank{self._context.rank}.json"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            profile.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:  # the run directory is full, say; training needs no profile
            log.warning("the profile of these steps is lost: %s", error)
        else:
            log.info("profile written to %s", path)

    def _timers(self) -> dict[str, float]:
        """Seconds of each phase of the step, by `<name>_s`. Waits for the GPU, which has only the optimizer's step left to do."""
        found: dict[str, float] = {}
        if self._spans:
            self._meter.wait(self._spans[-1][2])
        for name, before, behind in self._spans:
            found[f"{name}_s"] = found.get(f"{name}_s", 0.0) + self._meter.seconds(before, behind)
        return found


def _finite(number: float) -> float | None:
    """JSON has no NaN."""
    return number if math.isfinite(number) else None
