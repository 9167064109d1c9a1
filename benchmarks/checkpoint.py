"""What checkpoints cost, side by side in one run: the raw disk, PyTorch DCP, and this project's saves, snapshots and loads.

    python benchmarks/checkpoint.py [--mib 2304] [--rounds 5] [--dir DIR] [--part disk|stall|reshard|training ...] [--json FILE]

disk      two ranks save and load the same state durably, cold: raw O_DIRECT and write + fsync, DCP, `checkpoint.save`,
          a snapshot that the snapshot daemon flushes; CPU seconds with each
stall     how long training stands still for a snapshot, against a copy of the same bytes between warm buffers
reshard   bytes read against bytes needed, loading onto other layouts
training  tokens per second of the trainer with a snapshot in RAM at every step, against none

Contestants take turns, round after round, and medians of ratios within a round are told. Cold reads need root (drop_caches);
without it they say so and are warm.
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

# In ranks that are spawned this script's directory is not on the path; on it, this file would be the package `checkpoint`.
sys.path.insert(0, str(Path(__file__).parent))
import figures
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from node_daemon import NodeDaemon  # which takes this folder off the path
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import checkpoint
from checkpoint import direct, layout
from checkpoint.local_shard import part_of
from checkpoint.source import DirectorySource

RANKS = 2
WIDTH = 1024
WEIGHTS = {"qkv": (3 * WIDTH, WIDTH), "out": (WIDTH, WIDTH), "up": (4 * WIDTH, WIDTH), "down": (WIDTH, 4 * WIDTH)}
RUN = 8 << 20


def cpu_s() -> float:
    """CPU seconds of this process with its threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def peak_bytes() -> int:
    """Most memory that this process ever had to itself."""
    return next(
        int(line.split()[1]) << 10 for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")
    )


def drop_caches() -> bool:
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        return False
    return True


# -- two ranks -----------------------------------------------------------------------------------------------------------


def rank_main(rank: int, store: str, mib: int, rounds: int, parts: list[str], base: str, queue: Any) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    bench = Bench(rank, mib, Path(base))
    found: dict[str, Any] = {}
    if "disk" in parts:
        found["disk"] = bench.disk(rounds)
    if "stall" in parts:
        found["stall"] = bench.stall(rounds)
    if "reshard" in parts:
        found["reshard"] = bench.reshard()
    if rank == 0:
        queue.put(found)
    dist.barrier()
    os._exit(0)


class Bench:
    """One rank's share of a GPT's parameters and moments: each layer's weights, their rows over the ranks."""

    def __init__(self, rank: int, mib: int, base: Path) -> None:
        self.rank, self.base = rank, base
        mesh = init_device_mesh("cpu", (RANKS,))
        self.layers = max(1, round((mib << 20) / (3 * 12 * WIDTH**2 * 4)))
        generator = torch.Generator().manual_seed(rank)
        self.state: dict[str, DTensor] = {}
        for kind in ("model", "moment1", "moment2"):
            for name, shape in WEIGHTS.items():
                for layer in range(self.layers):
                    local = torch.randn(shape[0] // RANKS, shape[1], generator=generator)
                    self.state[f"{kind}/{name}.{layer}"] = DTensor.from_local(local, mesh, [Shard(0)])
        self.local_bytes = sum(each.to_local().numel() * 4 for each in self.state.values())
        self.bytes = self.local_bytes * RANKS

    def local_shards(self, state: dict[str, Any] | None = None) -> list[checkpoint.LocalShard]:
        found = []
        for name, tensor in (state or self.state).items():
            array, layer = name.split(".")
            found.append(checkpoint.local_shard_of(array, tensor, stack=(int(layer), self.layers)))
        return found

    def timed(self, work: Callable[[], object]) -> tuple[float, float]:
        """Wall seconds until the last rank is done; CPU seconds of all."""
        dist.barrier()
        began, used = time.perf_counter(), cpu_s()
        work()
        used = cpu_s() - used
        dist.barrier()
        told: list[Any] = [None] * RANKS
        dist.all_gather_object(told, used)
        return time.perf_counter() - began, sum(told)

    def cold(self) -> None:
        dist.barrier()
        if self.rank == 0:
            drop_caches()
        dist.barrier()

    # -- disk ----------------------------------------------------------------------------------------------------------

    def disk(self, rounds: int) -> dict[str, Any]:
        """Every contestant's seconds and CPU seconds, round by round."""
        buffer = direct.memory(RUN)
        torch.frombuffer(buffer, dtype=torch.uint8).random_(0, 256)
        raw = self.base / f"raw{self.rank}"
        load = {
            name: DTensor.from_local(torch.empty_like(t.to_local()), t.device_mesh, t.placements) for name, t in self.state.items()
        }

        def raw_write(through_cache: bool) -> None:
            raw.unlink(missing_ok=True)
            fd = os.open(raw, os.O_WRONLY | os.O_CREAT | (0 if through_cache else os.O_DIRECT))
            for offset in range(0, self.local_bytes, RUN):
                os.pwrite(fd, buffer, offset)
            os.fsync(fd)
            os.close(fd)

        def raw_read(through_cache: bool) -> None:
            fd = os.open(raw, os.O_RDONLY | (0 if through_cache else os.O_DIRECT))
            for offset in range(0, self.local_bytes, RUN):
                os.preadv(fd, [buffer], offset)
            os.close(fd)

        def dcp_save(threads: int = 1) -> None:
            writer = dcp.FileSystemWriter(self.base / "dcp", thread_count=threads, sync_files=True, overwrite=True)
            dcp.save(self.state, storage_writer=writer)

        def dcp_load() -> None:
            dcp.load(load, storage_reader=dcp.FileSystemReader(self.base / "dcp"))

        def save(step: int) -> None:
            checkpoint.save(self.base / "own", step, self.local_shards(), {}, generation=0, keep_last=1)

        def restore() -> None:
            checkpoint.restore(self.base / "own", lambda state: self.local_shards(load))

        checkpoint.save(self.base / "own", 0, self.local_shards(), {}, generation=0)  # the layout is agreed on once
        found: dict[str, list[tuple[float, float]]] = {}

        def take(name: str, work: Callable[[], object]) -> None:
            found.setdefault(name, []).append(self.timed(work))

        with NodeDaemon(self, RANKS) as daemon:
            daemon.flush(1)  # buffers are made once
            for number in range(rounds):
                step = number + 2
                take("raw write + fsync", lambda: raw_write(True))
                take("raw O_DIRECT write", lambda: raw_write(False))
                for name, threads in (("DCP save", 1), ("DCP, 2 threads", 2)):
                    self.clear_directory("dcp")
                    take(name, lambda threads=threads: dcp_save(threads))
                daemon_cpu = daemon.cpu_s()
                wall, used = self.timed(lambda step=step: daemon.flush(step))
                found.setdefault("snapshot + flush", []).append((wall, used + daemon.cpu_s() - daemon_cpu))
                take("save", lambda step=step: save(step))
                for name, work in (
                    ("raw read", lambda: raw_read(True)),
                    ("raw O_DIRECT read", lambda: raw_read(False)),
                    ("DCP load", dcp_load),
                    ("restore", restore),
                ):
                    self.cold()
                    take(name, work)
        same = all(torch.equal(load[name].to_local(), tensor.to_local()) for name, tensor in self.state.items())
        assert same, "what was loaded is not what was saved"
        return {"bytes": self.bytes, "times": found}

    def clear_directory(self, name: str) -> None:
        if self.rank == 0:
            shutil.rmtree(self.base / name, ignore_errors=True)
        dist.barrier()

    # -- stall ---------------------------------------------------------------------------------------------------------

    def stall(self, rounds: int) -> dict[str, Any]:
        """Seconds of a snapshot and of a plain copy of the same bytes, in turns; memory that snapshots need."""
        local = [tensor.to_local() for tensor in self.state.values()]
        before = peak_bytes()
        stalls, copies = [], []
        with NodeDaemon(self, RANKS) as daemon:
            for step in range(1, 4 * rounds + 1):
                stalls.append(daemon.snapshot(step))
            extra = peak_bytes() - before
            shared = sum(path.stat().st_blocks * 512 for path in daemon.place.rglob("c*") if path.is_file()) // RANKS
            target = [torch.zeros_like(each) for each in local]
            for _ in range(4 * rounds):
                dist.barrier()
                began = time.perf_counter()
                for one, other in zip(target, local, strict=True):
                    one.copy_(other)
                copies.append(time.perf_counter() - began)
        return {"local_bytes": self.local_bytes, "stalls": stalls[2:], "copies": copies[2:], "shared": shared, "own": extra}

    # -- reshard -------------------------------------------------------------------------------------------------------

    def reshard(self) -> dict[str, float]:
        """Bytes read for a byte that is needed, when the checkpoint of two ranks goes onto other layouts."""
        checkpoint.save(self.base / "reshard", 1, self.local_shards(), {}, generation=0)
        found = {}
        if self.rank == 0:
            counted = 0
            read = DirectorySource.read

            def count(source: DirectorySource, shard: layout.Shard, slot: int, target: memoryview) -> None:
                nonlocal counted
                counted += len(target)
                read(source, shard, slot, target)

            DirectorySource.read = count  # type: ignore[method-assign]
            for splits, tp in ((3, 1), (4, 1), (7, 1), (1, 1), (1, 2), (2, 2), (3, 2)):
                counted = needed = 0
                for where in product(range(splits), range(tp)):
                    wanted = [self.part(key, tensor, (splits, tp), where) for key, tensor in self.state.items()]
                    checkpoint.load(self.base / "reshard/step-00000001", wanted)
                    needed += sum(local_shard.data.nbytes for local_shard in wanted)
                found[f"data {splits} tensor {tp}"] = counted / needed
            DirectorySource.read = read  # type: ignore[method-assign]
        dist.barrier()
        return found

    def part(self, key: str, tensor: DTensor, splits: tuple[int, int], where: tuple[int, int]) -> checkpoint.LocalShard:
        """What a rank of another layout wants: rows over data ranks, and rows or columns over tensor ranks before that."""
        array, layer = key.split(".")
        rows, columns = tensor.shape
        along = 1 if array.endswith(("out", "down")) else 0
        low, length = part_of((rows, columns)[along], [splits[1]], [where[1]])
        if along == 0:
            first, count = part_of(length, [splits[0]], [where[0]])
            offset, extent = (low + first, 0), (count, columns)
        else:
            first, count = part_of(rows, [splits[0]], [where[0]])
            offset, extent = (first, low), (count, length)
        return checkpoint.LocalShard(
            array, (self.layers, rows, columns), (int(layer), *offset), torch.empty((1, *extent)), (1, 1, 1)
        )


# -- training ------------------------------------------------------------------------------------------------------------


def training(base: Path, rounds: int, steps: int) -> dict[str, list[float]]:
    """Tokens per second of the quickstart's model, with and without a snapshot at every step."""
    ram = [{"name": "ram", "path": f"/dev/shm/resilient-benchmark-{os.getpid()}", "every_steps": 1}]
    found: dict[str, list[float]] = {"none": [], "every step": []}
    for number in range(rounds):
        for name in found if number % 2 == 0 else reversed(found):
            run = base / f"{name.replace(' ', '-')}-{number}"
            tiers = [*(ram if name != "none" else []), {"name": "durable", "path": str(run / "checkpoints")}]
            command = [
                sys.executable,
                "-m",
                "resilient",
                "run",
                "examples/quickstart.yaml",
                f"run_dir={run}",
                f"train.steps={steps}",
            ]
            command += ["train.eval_interval=0", "checkpoint.every_steps=1000", f"checkpoint.tiers={json.dumps(tiers)}"]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=Path(__file__).parents[1])
            lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
            spent = lines[-1]["t"] - lines[9]["t"]
            found[name].append((lines[-1]["tokens"] - lines[9]["tokens"]) / spent)
            events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
            taken = sum(event["event"] == "snapshot" and event["tier"] == "ram" for event in events)
            assert taken >= (steps - 2 if name != "none" else 0), f"only {taken} of {steps} snapshots were taken"
            shutil.rmtree(run)
    return found


# -- the tale ------------------------------------------------------------------------------------------------------------


def median_ratio(ours: list[float], theirs: list[float]) -> float:
    return statistics.median(one / other for one, other in zip(ours, theirs, strict=True))


MEANING = "What a durable save, a snapshot and a restore cost beside the raw disk and PyTorch DCP, and what they cost the training."


def disk_figures(found: dict[str, Any]) -> Iterator[figures.Figure]:
    """Speeds beside the raw disk and DCP of the same round, and the processor time of each."""
    size = found["bytes"]
    speeds = {name: [size / wall / 1e9 for wall, _ in each] for name, each in found["times"].items()}
    costs = {name: [used / (size / 1e9) for _, used in each] for name, each in found["times"].items()}

    def faster(one: str, other: str) -> list[float]:
        return [max(pair) for pair in zip(speeds[one], speeds[other], strict=True)]

    writes, reads = faster("raw write + fsync", "raw O_DIRECT write"), faster("raw read", "raw O_DIRECT read")
    for name, what, raw, peers in (
        ("save", "durable save", writes, ("DCP save", "DCP, 2 threads")),
        ("snapshot + flush", "snapshot and its flush", writes, ("DCP save", "DCP, 2 threads")),
        ("restore", "cold, verified restore", reads, ("DCP load",)),
    ):
        yield figures.figure(f"{name}/raw", what, "GB/s", speeds[name], "the raw disk", raw, paired=True)
        for peer in peers:
            yield figures.figure(f"{name}/{peer}", what, "GB/s", speeds[name], peer, speeds[peer], paired=True)
        told = f"{what}: processor time"
        yield figures.figure(f"{name}/cpu", told, "CPU s/GB", costs[name], peers[0], costs[peers[0]], paired=True)


def stall_figures(found: dict[str, Any]) -> Iterator[figures.Figure]:
    """How long training stands still, and the memory that it takes."""
    size = found["local_bytes"]
    stalls, copies = ([1e3 * each for each in found[name]] for name in ("stalls", "copies"))
    what = f"training stopped for a snapshot of {size / 2**20:.0f} MiB a rank"
    yield figures.figure("stall", what, "ms", stalls, "a copy of the bytes", copies)
    yield figures.figure("memory", "buffers of snapshots", "MiB", [found["shared"] / 2**20], "a rank's state", [size / 2**20])
    yield figures.figure(
        "memory/own", "beside them in the rank's process", "MiB", [found["own"] / 2**20], "a rank's state", [size / 2**20]
    )


def tell_disk(found: dict[str, Any]) -> None:
    size, times = found["bytes"], found["times"]
    print(f"\ndurable, {size / 2**20:.0f} MiB, two ranks, against the faster raw way of the same round")
    walls = {name: [wall for wall, _ in each] for name, each in times.items()}
    for kind, names, raws, peer in (
        (
            "write",
            ("DCP save", "DCP, 2 threads", "save", "snapshot + flush"),
            ("raw write + fsync", "raw O_DIRECT write"),
            "DCP save",
        ),
        ("read, cold", ("DCP load", "restore"), ("raw read", "raw O_DIRECT read"), "DCP load"),
    ):
        best = [min(pair) for pair in zip(*(walls[raw] for raw in raws), strict=True)]
        for name in (*raws, *names):
            cpu = statistics.median(used for _, used in times[name]) / (size / 1e9)
            speed = size / statistics.median(walls[name]) / 1e9
            against = median_ratio(best, walls[name])
            beside = f"{median_ratio(walls[peer], walls[name]):5.2f} x DCP" if name in names else ""
            print(f"  {kind:10s} {name:20s} {speed:5.2f} GB/s  {against:5.2f} of raw  {cpu:5.2f} CPU s/GB  {beside}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=2304)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path)
    parser.add_argument("--steps", type=int, default=60, help="of each training; more than its warm-up has")
    parts = ("disk", "stall", "reshard", "training")
    parser.add_argument("--part", nargs="*", choices=parts, default=parts)
    args = figures.arguments(parser)
    told_figures: list[figures.Figure] = []
    base = Path(tempfile.mkdtemp(prefix="resilient-checkpoint-", dir=args.dir))
    try:
        if not drop_caches():
            print("not root: reads are warm")
        if set(args.part) - {"training"}:
            queue = mp.get_context("spawn").SimpleQueue()
            mp.spawn(rank_main, (str(base / "store"), args.mib, args.rounds, list(args.part), str(base), queue), RANKS)
            found = queue.get()
            if "disk" in found:
                tell_disk(found["disk"])
                told_figures += disk_figures(found["disk"])
            if "stall" in found:
                stall = found["stall"]
                told_figures += stall_figures(stall)
                ratio = statistics.median(stall["stalls"]) / statistics.median(stall["copies"])
                shared, own = stall["shared"] / stall["local_bytes"], stall["own"] / stall["local_bytes"]
                size = stall["local_bytes"] / 2**20
                print(f"\na snapshot of {size:.0f} MiB a rank stops training for {ratio:.2f} of a copy of the bytes")
                print(f"  memory of it: {shared:.2f} x the rank's state in buffers, {own:.2f} x in the rank's process beside them")
            if "reshard" in found:
                print(
                    "\nbytes read for a byte needed: "
                    + ", ".join(f"{name} {value:.2f}" for name, value in found["reshard"].items())
                )
                what = f"bytes read for a byte needed, onto {len(found['reshard'])} other layouts"
                told_figures.append(figures.figure("reshard", what, "", [*found["reshard"].values()]))
        if "training" in args.part:
            told = training(base, args.rounds, args.steps)
            ratio = median_ratio(told["every step"], told["none"])
            print(f"\ntraining with a snapshot at every step: {ratio:.3f} of the tokens/s without ({told})")
            with_, without = told["every step"], told["none"]
            what = "training with a snapshot in memory at every step"
            told_figures.append(figures.figure("training", what, "tokens/s", with_, "without", without, paired=True))
        figures.save(args.json, MEANING, told_figures)
    finally:
        shutil.rmtree(base, ignore_errors=True)


if __name__ == "__main__":
    main()
