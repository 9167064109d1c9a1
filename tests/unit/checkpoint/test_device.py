"""Snapshots from a GPU: what is page-locked, and in which order the GPU is used. A stand-in checks it on tensors of the CPU."""

import ctypes
import itertools
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rank_buffers import resident_kib

from checkpoint import device as device_module
from checkpoint.device import Cuda, OrderOfUseError, StandIn
from checkpoint.layout import ArrayInfo
from checkpoint.local_shard import LocalShard
from checkpoint.plan import ShardSpec, chunks_to_write, plan
from checkpoint.saving import spec_of
from checkpoint.tiers.mapped import MappedBuffer, WritePlan, own_ranges

LAYERS, SIDE = 32, 4096


def stacked(dp: int) -> list[list[ShardSpec]]:
    """By rank: the rows of 32 stacked matrices that fully sharded data parallelism gives it."""
    rows = SIDE // dp
    shape, unit = (LAYERS, SIDE, SIDE), (1, rows, SIDE)
    return [
        [ShardSpec("model/w", "float32", shape, (layer, rank * rows, 0), (1, rows, SIDE), unit, 0, 1) for layer in range(LAYERS)]
        for rank in range(dp)
    ]


@pytest.mark.parametrize("dp", [8, 64])
def test_what_is_page_locked_is_within_one_percent_of_the_bytes_of_the_rank(dp: int):
    specs = stacked(dp)
    (info,) = plan(specs)
    tensor_bytes = LAYERS * SIDE * SIDE // dp * 4
    own_bytes = tensor_bytes // info.chunk_bytes * info.slot_bytes  # each chunk has a page behind it for its checksum
    for rank in (0, dp // 2, dp - 1):
        ranges = own_ranges(run for spec in specs[rank] for run in chunks_to_write(info, 0, spec))
        locked = sum(size for each in ranges.values() for _, size in each)
        assert own_bytes <= locked <= 1.01 * own_bytes
        assert locked <= 1.02 * tensor_bytes
        assert sum(map(len, ranges.values())) == LAYERS, "each is a call of the driver"


def test_no_page_belongs_to_two_ranks():
    specs = stacked(8)
    (info,) = plan(specs)
    taken: list[tuple[str, int, int]] = []
    for each in specs:
        found = own_ranges(run for spec in each for run in chunks_to_write(info, 0, spec))
        taken += [(path, first, first + size) for path, ranges in found.items() for first, size in ranges]
    ordered = sorted(taken)
    assert all(before[0] != after[0] or before[2] <= after[1] for before, after in itertools.pairwise(ordered))


# -- a buffer, in real files -------------------------------------------------------------------------------------------


def shards_of(rank: int, numbers: torch.Tensor) -> list[LocalShard]:
    """Half of the rows of two stacked layers, whose values are these."""
    return [
        LocalShard("w", (2, 512, 1024), (layer, rank * 256, 0), numbers[layer : layer + 1, rank * 256 :][:, :256], (1, 256, 1024))
        for layer in range(2)
    ]


class Lab:
    """A buffer directory, and what of it belongs to rank 0."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.numbers = torch.randn(2, 512, 1024)
        self.info: ArrayInfo
        (self.info,) = plan([[spec_of(each) for each in shards_of(rank, self.numbers)] for rank in range(2)])
        for shard in self.info.shards.values():
            (directory / shard.path).parent.mkdir(exist_ok=True, parents=True)
            with (directory / shard.path).open("wb") as file:
                file.truncate(shard.size_bytes)
        self.plans = [WritePlan.of(each, self.info, 0) for each in shards_of(0, self.numbers)]
        own: Mapping[str, list[tuple[int, int]]] = {}
        for each in self.plans:
            for run in each.chunk_runs:
                start = self.info.offset(run.slot)
                own.setdefault(str(directory / run.shard.path), []).append((start, start + run.length * self.info.slot_bytes))
        self.own = own

    def owns(self, address: int, size_bytes: int) -> bool:
        """Whether memory is mapped from slots of this rank, as the kernel tells."""
        for line in Path("/proc/self/maps").read_text().splitlines():
            span, _, offset, _, _, *path = line.split(maxsplit=5)
            low, high = (int(each, 16) for each in span.split("-"))
            if low <= address and address + size_bytes <= high:
                first = int(offset, 16) + address - low
                return any(start <= first and first + size_bytes <= end for start, end in self.own.get("".join(path), []))
        return False

    def written(self) -> torch.Tensor:
        """What the files have of rank 0, as (2, 256, 1024)."""
        out = torch.zeros(2, 256, 1024)
        rows, columns = self.info.chunk[1:]
        for shard in self.info.shards.values():
            data = (self.directory / shard.path).read_bytes()
            for chunk in self.info.touched((0, 0, 0), (2, 256, 1024)):
                here, slot = self.info.locate(chunk)
                if here == shard:
                    start = self.info.offset(slot)
                    block = torch.frombuffer(bytearray(data[start : start + self.info.chunk_bytes]), dtype=torch.float32)
                    row, column = chunk[1] * rows, chunk[2] * columns
                    out[chunk[0], row : row + rows, column : column + columns] = block.view(rows, columns)
        return out


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


def test_a_buffer_locks_its_own_pages_when_it_is_mapped_and_gives_them_back(lab: Lab):
    gpu = StandIn(lab.owns)
    buffer = MappedBuffer(lab.directory, lab.plans, gpu)
    own_bytes = 2 * 256 * 1024 * 4
    assert own_bytes <= gpu.locked <= 1.02 * own_bytes, "before the first snapshot"
    gpu.wait(buffer.copy(shards_of(0, lab.numbers)))
    assert torch.equal(lab.written(), lab.numbers[:, :256])
    buffer.close()
    assert gpu.locked == 0


def test_a_refusal_is_remembered_and_the_copy_is_right_without(lab: Lab):
    gpu = StandIn(lab.owns, grants=0)
    for _ in range(3):
        buffer = MappedBuffer(lab.directory, lab.plans, gpu)
        gpu.wait(buffer.copy(shards_of(0, lab.numbers)))
        buffer.close()
    assert gpu.tries == 1
    assert torch.equal(lab.written(), lab.numbers[:, :256])


def test_what_may_change_at_any_time_changes_behind_its_copy(lab: Lab):
    gpu = StandIn(lab.owns)
    buffer = MappedBuffer(lab.directory, lab.plans, gpu)
    for _ in range(2):
        lab.numbers += 1
        expected = lab.numbers[:, :256].clone()
        mark = buffer.copy(shards_of(0, lab.numbers))  # raises where memory is copied to that is still in flight
        lab.numbers += 1
        gpu.wait(mark)
        assert torch.equal(lab.written(), expected)


def test_what_is_late_must_not_change_before_the_gpu_is_held_back(lab: Lab):
    gpu = StandIn(lab.owns)
    buffer = MappedBuffer(lab.directory, lab.plans, gpu)
    mark = buffer.copy(shards_of(0, lab.numbers), [True, True])
    gpu.hold_back(mark)
    expected = lab.numbers[:, :256].clone()
    lab.numbers += 1
    gpu.wait(mark)
    assert torch.equal(lab.written(), expected)
    mark = buffer.copy(shards_of(0, lab.numbers), [True, True])
    lab.numbers += 1
    with pytest.raises(OrderOfUseError, match="held back"):
        gpu.hold_back(mark)


def test_memory_whose_copies_are_under_way_is_not_given_back(lab: Lab):
    gpu = StandIn(lab.owns)
    buffer = MappedBuffer(lab.directory, lab.plans, gpu)
    buffer.copy(shards_of(0, lab.numbers))
    with pytest.raises(OrderOfUseError, match="given back before"):
        buffer.close()


# -- the stand-in itself -----------------------------------------------------------------------------------------------


def test_what_a_gpu_would_do_wrong_is_an_error():
    gpu, host, data = StandIn(), torch.zeros(8), torch.ones(8)
    gpu.copy([host], [data])
    with pytest.raises(OrderOfUseError, match="read before"):
        gpu.read(host[3:5])
    with pytest.raises(OrderOfUseError, match="copied to again"):
        gpu.copy([host[7:]], [data[7:]])
    assert not host.any(), "it is copied by itself, some time"
    gpu.wait(gpu.mark())
    assert gpu.read(host).all()


@pytest.mark.parametrize(("grants", "left"), [(None, False), (0, True)], ids=["locked", "refused"])
def test_locked_pages_are_not_in_the_page_tables(grants: int | None, left: bool):
    """They are, where the GPU does not have them by itself, for this process copies into them."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as ram:
        lab, gpu = Lab(Path(ram)), StandIn(grants=grants)
        buffer = MappedBuffer(lab.directory, lab.plans, gpu)
        assert (resident_kib(lab.directory) > 0) == left
        gpu.wait(buffer.copy(shards_of(0, lab.numbers)))
        buffer.close()
        assert torch.equal(lab.written(), lab.numbers[:, :256]), "and they stay where they are"


def test_registrations_that_cuda_would_refuse_are_errors():
    gpu = StandIn(lambda address, size: address >= 1 << 20)
    with pytest.raises(OrderOfUseError, match="own"):
        gpu.register(1 << 16, 4096)
    with pytest.raises(OrderOfUseError, match="whole pages"):
        gpu.register((1 << 20) + 8, 4096)
    assert gpu.register(1 << 20, 8192)
    with pytest.raises(OrderOfUseError, match="already"):
        gpu.register((1 << 20) + 4096, 4096)
    with pytest.raises(OrderOfUseError, match="nothing is registered"):
        gpu.unregister(4096)


def test_a_registration_while_a_graph_is_recorded_is_no_refusal_for_good(monkeypatch: pytest.MonkeyPatch):
    statuses = [900, 0]
    runtime = SimpleNamespace(cudaHostRegister=lambda *_: statuses.pop(0))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(device_module, "forget_error", lambda device: None)
    gpu = Cuda(torch.device("cuda", 0))
    assert not gpu.register(4096, 4096)
    assert gpu.register(4096, 4096)


def test_a_thread_beside_recordings_is_declared_relaxed_to_the_driver(monkeypatch: pytest.MonkeyPatch):
    modes: list[int] = []

    def exchange(mode: Any) -> int:
        modes.append(mode._obj.value)
        return 0

    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(cuThreadExchangeStreamCaptureMode=exchange))
    Cuda(torch.device("cuda", 0)).beside_recordings()
    assert modes == [2], "CU_STREAM_CAPTURE_MODE_RELAXED"

    def nothing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", nothing)
    Cuda(torch.device("cuda", 0)).beside_recordings()


def test_an_error_of_a_registration_is_not_left_for_the_next_kernel(monkeypatch: pytest.MonkeyPatch):
    class Runtime:
        """CUDA's, which refuses to page-lock and remembers that."""

        last, calls = 0, list[int | None]()

        def cudaHostRegister(self, *_: Any) -> int:
            self.calls.append(current[-1])
            self.last = 2
            return 2

    runtime = Runtime()
    current: list[int | None] = [None]  # the device of this thread

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        current.append(device.index)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", on)

    def launch(_: float) -> None:
        """A kernel, after which torch asks for the last error."""
        error, runtime.last = runtime.last, 0
        if error:
            raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(device_module.torch, "empty", lambda *_, **__: SimpleNamespace(add_=launch))
    gpu = Cuda(torch.device("cuda", 3))
    assert not gpu.register(4096, 4096)
    assert not gpu.register(8192, 4096)
    assert runtime.last == 0
    assert runtime.calls == [3], "asked once, and not of the first GPU, on which every rank would have a context then"
