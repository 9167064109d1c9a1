"""A worker killed or stopped, to the next finished step: launchers side by side, same trainer, same machine, same run.

    python benchmarks/recovery.py [--kills 20] [--stops 0] [--launchers resilient,torchrun,nvrx] [--ft-launcher PATH] [--json FILE]
    python benchmarks/recovery.py --leaks --kills 200 [--json FILE]

torchrun and NVRx get the workaround for their shared store and short intervals of looking; torchrun never notices a stop. Launchers
take turns, so that a noisy machine is noisy for all. Of ours the time is told by phase, and the processor time of the new ranks.

With --leaks ours alone is killed at random moments, recoveries included; then: hangs, losses that differ from those of a run
without faults, and whatever was left of processes, files, descriptors and sockets. Exit status 1 if there is any.
"""

import argparse
import contextlib
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import figures
import psutil
from launchers import Launcher, Resilient, make
from leaks import soak

from resilient import ledger
from resilient.config import load
from resilient.heartbeat.region import peek

CONFIG = Path(__file__).with_name("recovery.yaml")
MEANING = "How long training stands still when a worker of a node dies or stops answering, with each launcher's shortest intervals."
LEAKS_MEANING = (
    "Whether kills at random moments, recoveries included, leave anything behind or change a loss; 0 findings are right."
)
PHASES = ("detected", "old generation gone, agents ready", "ranks running", "restored", "first step")


@dataclass
class Times:
    """What was measured of a launcher: seconds by kind of fault, and of ours phase by phase."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: {"kill": [], "stop": []})
    phases: dict[str, list[float]] = field(default_factory=lambda: {phase: [] for phase in PHASES})
    step_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)


class Watch:
    """Follows the regions of our ranks through a recovery: when the last of them runs, and when it has restored."""

    def __init__(self, launcher: Resilient, generation: int) -> None:
        self._launcher, self._generation = launcher, generation
        self.running: dict[str, float] = {}
        self.restored: dict[str, float] = {}

    def __call__(self) -> None:
        for path in self._launcher.regions():
            if path.suffix or int(path.name[1:].partition("-")[0]) <= self._generation:
                continue
            with contextlib.suppress(OSError, ValueError):
                activity = peek(path)
                if activity.pid:
                    self.running.setdefault(path.name, activity.phase_t or time.time())
                    if activity.phase not in ("start", "load") or (
                        activity.phase == "start" and activity.phase_t > self.running[path.name]
                    ):
                        self.restored.setdefault(path.name, activity.phase_t)


def hurt(launcher: Launcher, kind: str, chance: random.Random, times: Times) -> None:
    """One fault, and the time to the next finished step."""
    time.sleep(chance.uniform(1.5, 3.0))
    while True:
        ranks, before = launcher.ranks(), launcher.newest()
        watch = Watch(launcher, int(before["generation"])) if isinstance(launcher, Resilient) else lambda: None
        began = time.time()
        try:
            os.kill(ranks[chance.choice(sorted(ranks))], signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
            break
        except (LookupError, ProcessLookupError):  # it is restarting of its own accord
            time.sleep(0.5)
    times.step_s.append(before["step_s"])
    line = launcher.wait(lambda line: line["generation"] > before["generation"], watch)
    times.seconds[kind].append(line["t"] - began)
    times.cpu_s.append(sum(map(_cpu_s, launcher.ranks().values())))
    if isinstance(watch, Watch) and kind == "kill":
        for phase, seconds in phases(launcher, watch, began, line).items():
            times.phases[phase].append(seconds)


def _cpu_s(pid: int) -> float:
    try:
        spent = psutil.Process(pid).cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return spent.user + spent.system


def phases(launcher: Launcher, watch: Watch, began: float, line: dict[str, Any]) -> dict[str, float]:
    """A recovery cut by what the ledger and the heartbeat regions say; nothing where an entry is missing."""
    generation = line["generation"]
    events = list(ledger.read(launcher.run_dir / ledger.EVENTS))
    known = [event["t"] for event in events if event["event"] == "fault" and event["t"] > began]
    started = [event["t"] for event in events if event["event"] == "generation_started" and event["generation"] == generation]
    if not (known and started and watch.running and watch.restored):
        return {}
    moments = [began, known[0], started[0], max(watch.running.values()), max(watch.restored.values()), line["t"]]
    return {phase: max(0.0, end - start) for phase, start, end in zip(PHASES, moments[:-1], moments[1:], strict=True)}


def compare(args: argparse.Namespace, scratch: Path, ranks: int) -> None:
    """Rounds of faults, launchers in turn."""
    launchers: list[Launcher] = []
    for name in args.launchers.split(","):
        try:
            launchers.append(make(name, args.config, scratch / name, ranks, args.ft_launcher))
        except FileNotFoundError as error:
            say(f"{name} is left out: {error}")
    found = {launcher.name: Times() for launcher in launchers}
    try:
        rounds(args, launchers, found)
    except KeyboardInterrupt:
        say("interrupted")
    show(found)
    complete = all(len(times.seconds["kill"]) == args.kills for times in found.values())
    error = "" if complete else "not every fault was recovered from: see what the script printed"
    figures.save(args.json, MEANING, [*as_figures(found)], versions=peers(args.ft_launcher), error=error)


def rounds(args: argparse.Namespace, launchers: list[Launcher], found: dict[str, Times]) -> None:
    chance = random.Random(args.seed)
    for number in range(args.rounds):
        for launcher in launchers:
            plan = ["kill"] * share(args.kills, args.rounds, number)
            plan += ["stop"] * share(args.stops, args.rounds, number) if launcher.name != "torchrun" else []
            if not plan:
                continue
            try:
                launcher.start()
                for kind in plan:
                    hurt(launcher, kind, chance, found[launcher.name])
                    say(f"round {number + 1} {launcher.name}: {kind} {found[launcher.name].seconds[kind][-1]:.2f} s")
            except TimeoutError as error:
                say(str(error))
            finally:
                launcher.stop()


def share(count: int, rounds: int, number: int) -> int:
    return count // rounds + (number < count % rounds)


def show(found: dict[str, Times]) -> None:
    """Medians and worst cases, and the ratios to ours."""
    for kind, title in (("kill", "kill -9"), ("stop", "SIGSTOP")):
        rows = {name: sorted(times.seconds[kind]) for name, times in found.items() if times.seconds[kind]}
        if not rows:
            continue
        say(f"{title} of a worker to the next finished step, seconds")
        ours = statistics.median(rows["resilient"]) if "resilient" in rows else None
        for name, seconds in rows.items():
            ratio = "" if ours is None else f"  {statistics.median(seconds) / ours:5.2f}x"
            step_ms, cpu_s = 1000 * statistics.median(found[name].step_s), statistics.median(found[name].cpu_s)
            spread = (
                f"median {statistics.median(seconds):6.3f}  worst {seconds[-1]:6.3f}  best {seconds[0]:6.3f}  of {len(seconds)}"
            )
            say(f"  {name:10} {spread}{ratio}  (step {step_ms:.0f} ms, processor time of the new ranks {cpu_s:.2f} s)")
        if kind == "stop" and "torchrun" in found:
            say("  torchrun   never")
    times = found.get("resilient")
    if times is not None and times.phases[PHASES[0]]:
        say(f"of it, by phase (medians of {len(times.phases[PHASES[0]])})")
        for phase, each in times.phases.items():
            say(f"  {phase:36} {statistics.median(each):6.3f}  worst {max(each):6.3f}")


def save_leaks(args: argparse.Namespace, seconds: list[float], wrong: list[str]) -> None:
    found = [figures.figure("findings", f"what was left behind or differed after {args.kills} kills", "", [len(wrong)])]
    if seconds:
        found.append(figures.figure("downtime", "downtime of a kill at a random moment, by the ledger", "s", seconds))
    figures.save(args.json, LEAKS_MEANING, found, benchmark="leaks", error="; ".join(wrong))


def as_figures(found: dict[str, Times]) -> Iterator[figures.Figure]:
    """Ours beside each other launcher, and ours by phase."""
    ours = found.get("resilient", Times())
    for kind, what in (("kill", "`kill -9` of a worker to the next finished step"), ("stop", "SIGSTOP of a worker to the same")):
        if not ours.seconds[kind]:
            continue
        for name, theirs in found.items():
            if name != "resilient" and (theirs.seconds[kind] or (kind, name) == ("stop", "torchrun")):
                note = "" if theirs.seconds[kind] else "does not notice it"
                yield figures.figure(f"{kind}/{name}", what, "s", ours.seconds[kind], name, theirs.seconds[kind], note=note)
        if found.keys() == {"resilient"}:
            yield figures.figure(kind, what, "s", ours.seconds[kind])
    for phase, seconds in ours.phases.items():
        if seconds:
            yield figures.figure(f"phase/{phase}", f"of the kill: {phase}", "s", seconds)
    if ours.step_s:
        yield figures.figure("step", "a step without a fault", "s", ours.step_s)
        yield figures.figure("cpu", "processor time of the new ranks up to their first step", "s", ours.cpu_s)


def peers(ft_launcher: str | None) -> dict[str, str]:
    """The version of NVRx, which may be installed elsewhere."""
    launcher = ft_launcher or shutil.which("ft_launcher")
    if launcher is None:
        return {}
    ask = "from importlib.metadata import version; print(version('nvidia-resiliency-ext'))"
    interpreter = Path(launcher).with_name("python")
    done = subprocess.run([interpreter, "-c", ask], capture_output=True, text=True, check=False)
    return {"nvidia-resiliency-ext": done.stdout.strip()} if done.returncode == 0 else {}


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="of each launcher")
    parser.add_argument("--stops", type=int, default=0, help="of each launcher that notices them")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--launchers", default="resilient,torchrun,nvrx")
    parser.add_argument("--ft-launcher", help="NVRx's, where it is not on the path")
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--leaks", action="store_true")
    args = figures.arguments(parser)
    ranks = int(load(args.config, []).cluster.procs_per_node)
    with tempfile.TemporaryDirectory(prefix="recovery-") as scratch:
        if args.leaks:
            seconds, wrong = soak(args.config, Path(scratch), args.kills, random.Random(args.seed), say)
            save_leaks(args, seconds, wrong)
            return int(bool(wrong))
        compare(args, Path(scratch), ranks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
