"""What a long past costs: `resilient status`, `report`, `status --watch`, and the start of a job, beside those of ten steps.

    python benchmarks/past.py [--steps 1000000] [--faults 10000] [--jobs 200] [--rounds 5] [--watch-s 30] [--json FILE]

Ledger and metrics are written by `tests/long_campaign.py`, and read once as a driver does that finds nothing kept: how long that
takes is told, too, as is how long a report takes then. `--watch` runs while lines are appended, 2.5 steps/s with a snapshot each.
The start is from the command to `run_started` in the ledger, of a script that ends at once; both campaigns take turns. Exit status
1 if `status` takes more than 150 MiB.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import figures
import psutil

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from long_campaign import STEP_S, Written, campaign, write

from resilient import ledger, storage
from resilient.past.record import FILE, Reader
from resilient.report.command import FILE as PAGE

MEANING = "What a past of a million steps and ten thousand faults costs: report, status, and the start of a job."
COMMAND = (sys.executable, "-m", "resilient")
SHORT, LONG = "ten steps", "long"
MOST_MIB = 150.0
WATCH_SETTLE_S = 5.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--faults", type=int, default=10_000)
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--watch-s", type=float, default=30.0)
    args = figures.arguments(parser)
    with tempfile.TemporaryDirectory(prefix="past-") as scratch:
        dirs = {name: Path(scratch) / name.replace(" ", "-") for name in (SHORT, LONG)}
        write(dirs[SHORT], campaign(10, 1, 1))
        write(dirs[LONG], campaign(args.steps, args.faults, args.jobs))
        found = [
            *_report(dirs, args.rounds),
            *_read(dirs),
            *_status(dirs, args.rounds),
            *_watch(dirs[LONG], args),
            *_start(dirs, args.rounds),
        ]
    figures.save(args.json, MEANING, found)
    for each in found:
        beside = "" if each.peer_value is None else f", of {each.peer}: {each.peer_value.median:.3g}"
        print(f"{each.what}: {each.value.median:.3g} {each.unit} ({each.value.low:.3g} to {each.value.high:.3g}){beside}")
    return int(next(each.value.high for each in found if each.name == "memory") > MOST_MIB)


def _report(dirs: dict[str, Path], rounds: int) -> Iterator[figures.Figure]:
    """With nothing kept."""
    seconds: dict[str, list[float]] = {name: [] for name in dirs}
    for _, (name, run_dir) in itertools.product(range(rounds), dirs.items()):
        began = time.monotonic()
        subprocess.run([*COMMAND, "report", str(run_dir)], stdout=subprocess.DEVNULL, check=True)
        seconds[name].append(time.monotonic() - began)
    yield figures.figure("report", "`resilient report` where nothing was kept", "s", seconds[LONG], SHORT, seconds[SHORT])
    yield figures.figure("page", "its page", "KiB", [(dirs[LONG] / PAGE).stat().st_size / 1024])


def _read(dirs: dict[str, Path]) -> Iterator[figures.Figure]:
    """Once, with nothing kept; then it is kept."""
    for run_dir in dirs.values():
        reader = Reader(run_dir)
        began = time.monotonic()
        reader.read()
        took_s = time.monotonic() - began
        reader.keep()
    yield figures.figure("again", "ledger and metrics read whole, where nothing was kept", "s", [took_s])
    yield figures.figure("size", "what is kept", "KiB", [(dirs[LONG] / FILE).stat().st_size / 1024])


def _status(dirs: dict[str, Path], rounds: int) -> Iterator[figures.Figure]:
    seconds: dict[str, list[float]] = {name: [] for name in dirs}
    processor: dict[str, list[float]] = {name: [] for name in dirs}
    memory_mib = []
    for _, (name, run_dir) in itertools.product(range(rounds), dirs.items()):
        began = time.monotonic()
        process = subprocess.Popen([*COMMAND, "status", str(run_dir), "--json"], stdout=subprocess.DEVNULL)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"status failed: {process.returncode}")
        seconds[name].append(time.monotonic() - began)
        processor[name].append(used.ru_utime + used.ru_stime)
        if name == LONG:
            memory_mib.append(used.ru_maxrss / 1024)
    yield figures.figure("status", "`resilient status`", "s", seconds[LONG], SHORT, seconds[SHORT])
    yield figures.figure("status, processor", "its processor time", "s", processor[LONG], SHORT, processor[SHORT])
    yield figures.figure("memory", "its memory", "MiB", memory_mib)


def _watch(run_dir: Path, args: argparse.Namespace) -> Iterator[figures.Figure]:
    if not args.watch_s:
        return
    with subprocess.Popen([*COMMAND, "status", str(run_dir), "--watch"], stdout=subprocess.DEVNULL) as process:
        try:
            more = _more(args)
            _append_for(run_dir, more, WATCH_SETTLE_S)
            before, began = sum(psutil.Process(process.pid).cpu_times()[:2]), time.monotonic()
            _append_for(run_dir, more, args.watch_s)
            used_s = sum(psutil.Process(process.pid).cpu_times()[:2]) - before
            took_s = time.monotonic() - began
        finally:
            process.terminate()
    yield figures.figure("watch", "`resilient status --watch`, of a core", "%", [100 * used_s / took_s])


def _more(args: argparse.Namespace) -> Iterator[Written]:
    """What comes after the campaign."""
    return itertools.islice(campaign(2 * args.steps, args.faults, args.jobs), 2 * args.steps, None)


def _append_for(run_dir: Path, lines: Iterator[Written], seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for name, entry in itertools.islice(lines, 2):
            with (run_dir / name).open("a") as file:
                file.write(json.dumps(entry) + "\n")
        time.sleep(STEP_S)


def _start(dirs: dict[str, Path], rounds: int) -> Iterator[figures.Figure]:
    """From the command to the first line that a job writes."""
    script = dirs[SHORT].with_name("nothing.py")
    script.write_text("")
    for number, run_dir in enumerate(dirs.values()):
        # A job refuses to start where nothing is of the steps that its ledger calls committed.
        durable = run_dir / "checkpoints"
        durable.mkdir()
        (durable / storage.IDENTITY).write_text(f"{number:012x}\n")
    seconds: dict[str, list[float]] = {name: [] for name in dirs}
    for turn, (name, run_dir) in itertools.product(range(rounds + 1), dirs.items()):
        size = (run_dir / ledger.EVENTS).stat().st_size
        began = time.time()
        done = subprocess.run(
            [*COMMAND, "run", "--run-dir", str(run_dir), "--procs", "1", str(script)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"the campaign failed: {done.stdout}{done.stderr}")
        started = next(line for line in ledger.read(run_dir / ledger.EVENTS, size) if line["event"] == "run_started")
        if turn:
            seconds[name].append(started["t"] - began)
    yield figures.figure("start", "from the command to the job's first line", "s", seconds[LONG], SHORT, seconds[SHORT])


if __name__ == "__main__":
    sys.exit(main())
