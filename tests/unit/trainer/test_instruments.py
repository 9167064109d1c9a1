"""Time and memory of a step's phases on a GPU, which does its work later than it is told to. A stand-in checks the order of use."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from resilient import worker
from resilient.config import Config
from trainer.device import Cuda, Host, OrderOfUseError, StandIn, meter_of
from trainer.gradients import Found
from trainer.instruments import Instruments


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Lines of metrics."""
    lines: list[dict[str, Any]] = []
    monkeypatch.setattr(worker, "report", lambda line, **_: lines.append(line))
    return lines


def instruments(gpu: StandIn, rank: int = 0, **logging: bool) -> Instruments:
    context = worker.Context(rank, rank, 2, 2, 0, None, False)
    config = Config.model_validate({"logging": logging})
    return Instruments(config, context, torch.device("cpu"), 1, None, gpu)


def step(under_test: Instruments, gpu: StandIn, number: int) -> None:
    under_test.start_step(number)
    for _ in range(2):  # a batch that is computed again
        with under_test.span("forward_backward"):
            gpu.launch(3.0, size_bytes=number << 30)
        with under_test.span("reduce"):
            gpu.launch(0.25)
            gpu.wait(gpu.mark())  # as the loss is read
    with under_test.span("optimizer"):
        gpu.launch(0.5)
    under_test.report(Found(1.0, 1.0, 0.0), 1e-3, 4, SimpleNamespace(step=number, consumed_samples=4), skipped=None)


def test_phases_last_as_long_as_the_gpu_works_at_them(told: list[dict[str, Any]]):
    gpu = StandIn()
    under_test = instruments(gpu)
    for number in (1, 2):
        step(under_test, gpu, number)
        assert {name: told[-1][name] for name in ("forward_backward_s", "reduce_s", "optimizer_s")} == {
            **{"forward_backward_s": 6.0, "reduce_s": 0.5, "optimizer_s": 0.5},
        }


def test_the_memory_of_a_step_is_that_steps_peak(told: list[dict[str, Any]]):
    gpu = StandIn()
    under_test = instruments(gpu)
    for number in (5, 1):
        step(under_test, gpu, number)
    assert [line["memory_bytes"] for line in told] == [5 << 30, 1 << 30]


@pytest.mark.parametrize(("rank", "timers"), [(1, True), (0, False)])
def test_a_gpu_whose_timers_nobody_reads_is_not_waited_for(told: list[dict[str, Any]], rank: int, timers: bool):
    gpu = StandIn()
    before = gpu.mark()
    step(instruments(gpu, rank, timers=timers), gpu, 1)
    with pytest.raises(OrderOfUseError):
        gpu.seconds(before, gpu.mark())  # the optimizer's half second
    assert not any("optimizer_s" in line for line in told)


def test_what_a_gpu_would_refuse_or_tell_wrongly_is_an_error():
    gpu, other = StandIn(), StandIn()
    first = gpu.mark()
    gpu.launch(1.0)
    last = gpu.mark()
    with pytest.raises(OrderOfUseError, match="before the device has passed"):
        gpu.seconds(first, last)
    gpu.wait(last)
    assert gpu.seconds(first, last) == 1.0
    with pytest.raises(OrderOfUseError, match="behind the last"):
        gpu.seconds(last, first)
    with pytest.raises(OrderOfUseError, match="no mark of this device"):
        other.wait(last)


def test_a_gpu_is_timed_by_events_in_its_stream_and_its_own_peak(monkeypatch: pytest.MonkeyPatch):
    """Stands for torch's events, streams and allocator."""
    asked: list[object] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            asked.append(("event", enable_timing))

        def record(self, stream: object) -> None:
            asked.append(("record", stream))

        def synchronize(self) -> None:
            asked.append("synchronize")

        def elapsed_time(self, _: "Event") -> float:
            return 1500.0  # milliseconds

    gpu = torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: ("stream of", device))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: asked.append(("reset", device)))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 7)
    meter = meter_of(gpu)
    assert isinstance(meter, Cuda)
    first = meter.mark()
    meter.wait(first)
    assert meter.seconds(first, meter.mark()) == 1.5
    meter.forget_peak()
    assert asked[:3] == [("event", True), ("record", ("stream of", gpu)), "synchronize"]
    assert asked[-1] == ("reset", gpu)
    assert meter.peak_bytes() == 7


def test_the_cpu_is_timed_by_its_clock():
    meter = meter_of(torch.device("cpu"))
    assert isinstance(meter, Host)
    first = meter.mark()
    last = meter.mark()
    assert 0 <= meter.seconds(first, last) < 60
    assert meter.peak_bytes() > 1 << 20


def test_a_profile_that_cannot_be_written_ends_no_rank(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "profile").write_text("in the place of the directory")
    context = worker.Context(0, 0, 1, 1, 0, None, False)
    config = Config.model_validate({"run_dir": str(tmp_path), "logging": {"profile_steps": [1, 2]}})
    under_test = Instruments(config, context, torch.device("cpu"), 1, None, StandIn())
    under_test.start_step(1)
    assert under_test._profile is not None
    under_test.close()
    assert "the profile of these steps is lost" in caplog.text


def test_a_restart_within_the_steps_to_be_profiled_records_the_rest_of_them(tmp_path: Path, told: list[dict[str, Any]]):
    config = Config.model_validate({"run_dir": str(tmp_path), "logging": {"profile_steps": [2, 4]}})
    for generation, steps in enumerate([(1, 2, 3), (4, 5), (5, 6)]):
        context = worker.Context(0, 0, 1, 1, generation, None, False)
        under_test = Instruments(config, context, torch.device("cpu"), 1, None, StandIn())
        for number in steps:
            step(under_test, StandIn(), number)
        under_test.close()
    assert sorted(path.name for path in (tmp_path / "profile").iterdir()) == ["g0-rank0.json", "g1-rank0.json"]
