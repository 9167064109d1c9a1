"""The soak: kills at random moments, then whatever is not as it was.

Owns what counts as a leak: descriptors, sockets and processes of a job that goes on, files in RAM and in the temporary directory
of one that has ended, and losses that differ from those of a run without faults.
"""

import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil
from launchers import Launcher, Resilient, make

from resilient import ledger
from resilient.agent.memory import daemon_directory, region_directory

SETTLED_KILLS = 5  # by then everything that is made once is there
QUIET_STEPS = 15
LOOKS = 10
CACHE = "torchinductor"  # torch's, and meant to stay


def soak(
    config: Path, scratch: Path, kills: int, chance: random.Random, say: Callable[[str], None]
) -> tuple[list[float], list[str]]:
    """Kill ranks at random moments; the downtimes in seconds, and what is wrong afterwards."""
    run = make("resilient", config, scratch / "killed", 2, None)
    assert isinstance(run, Resilient)
    run.start()
    wrong: list[str] = []
    first: Counter[str] = Counter()
    try:
        for number in range(kills):
            if number == SETTLED_KILLS:
                first = _quiet(run)
            _kill(run, chance)
            if number % 20 == 19:
                say(f"{number + 1} kills, step {run.newest()['step']}")
        last = _quiet(run)
        wrong += [f"{what}: {first[what]} before, {count} after" for what, count in last.items() if count > first[what]]
        family = run.family()
        status = run.drain()
        if status != 75:
            wrong.append(f"the run ended with status {status}")
        wrong += [
            f"process {each.pid} is still there" for each in family if each.is_running() and each.status() != psutil.STATUS_ZOMBIE
        ]
        wrong += [f"left in RAM: {path}" for path in _in_memory(run)]
        left = [path.name for path in run.temporary.iterdir() if not path.name.startswith(CACHE)]
        wrong += [f"left in the temporary directory: {name}" for name in left]
        wrong += _different_losses(run, config, scratch)
    except TimeoutError as error:
        wrong.append(f"hang: {error}")
    finally:
        run.stop()
    events = list(ledger.read(run.run_dir / ledger.EVENTS))
    times = sorted(event["downtime_s"] for event in events if event["event"] == "recovered")
    say(
        f"{kills} kills, {len(times)} recoveries: median {times[len(times) // 2]:.2f} s, worst {times[-1]:.2f} s"
        if times
        else "none"
    )
    say(f"before and after: {dict(first)}")
    for each in wrong:
        say(f"wrong: {each}")
    say("nothing is wrong" if not wrong else f"{len(wrong)} findings")
    return times, wrong


def _kill(run: Resilient, chance: random.Random) -> None:
    """One kill at a moment of its own: in a step, in a snapshot, or in the recovery from the kill before."""
    wait_s = chance.choice([chance.uniform(0.0, 0.5), chance.uniform(0.5, 3.0)])
    time.sleep(wait_s)  # into the recovery from the kill before, or into a step or a snapshot after it
    deadline = time.time() + 60.0
    while time.time() < deadline:
        ranks = run.ranks()
        if ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(ranks[chance.choice(sorted(ranks))], signal.SIGKILL)
                return
        time.sleep(0.01)  # between a look at the ranks and the next
    raise TimeoutError("no rank to kill for 60 s")


def _quiet(run: Launcher) -> Counter[str]:
    """What there is of each kind once the run has gone on undisturbed for a while."""
    generation = run.newest()["generation"]
    settled = run.wait(lambda line: line["generation"] > generation or time.time() - line["t"] < 1.0)
    run.wait(lambda line: line["step"] >= settled["step"] + QUIET_STEPS)
    found = _look(run)
    for _ in range(LOOKS - 1):
        time.sleep(0.1)  # between a look at the processes and the next
        found &= _look(run)  # the least of each: a file that is being written is no leak, one that is left is there in every look
    return found


def _look(run: Launcher) -> Counter[str]:
    found: Counter[str] = Counter()
    for process in run.family():
        with contextlib.suppress(psutil.NoSuchProcess):
            kinds = ("agent", "template", "forkserver", "rank", "standby")
            name = next((each for each in kinds if process.name().startswith(each)), "")
            name = name or ("snapshot daemon" if "checkpoint.daemon" in process.cmdline() else "driver")
            found[f"processes ({name})"] += 1
            if name not in kinds[1:]:
                buffers = sum("/buffer-" in file.path for file in process.open_files())  # there are few of them
                found[f"descriptors ({name})"] += process.num_fds() - buffers
                found[f"sockets ({name})"] += len(process.net_connections(kind="all"))
    found["files in RAM"] = len(_in_memory(run))
    return found


def _in_memory(run: Launcher) -> list[Path]:
    """Heartbeat regions, and what the snapshot daemon shares with the ranks."""
    roots = region_directory(run.run_dir, 0), daemon_directory(run.run_dir, 0)
    return sorted(path for root in roots if root.is_dir() for path in (root, *root.rglob("*")))


def _different_losses(run: Launcher, config: Path, scratch: Path) -> list[str]:
    """Steps whose loss is not that of a run without faults, to the last bit."""
    steps = run.newest()["step"]
    calm = make("resilient", config, scratch / "calm", 2, None)
    try:
        calm.start()
        calm.wait(lambda line: line["step"] >= steps)
    finally:
        calm.stop()
    right = {line["step"]: repr(line["loss"]) for line in ledger.read(calm.run_dir / ledger.METRICS)}
    lines = [line for line in ledger.read(run.run_dir / ledger.METRICS) if "loss" in line]
    return [
        f"step {line['step']} of generation {line['generation']}: loss {line['loss']!r}, without faults {right.get(line['step'])}"
        for line in lines
        if repr(line["loss"]) != right.get(line["step"])
    ]
