"""Nodes lost in a lab with a real Slurm, and none to spare: what a crash, a link that flaps and a drain cost.

    python benchmarks/lost_nodes.py [--part PART...] [--crashes 20] [--driver-crashes 5] [--flaps 50] [--drains 10] [--seed 0]
        [--json FILE]

Each host is a set of namespaces of this machine ([lab](../docs/lab.md)); needed are root, iproute2, Slurm, munge (not for `hour`).
The trainer's model takes a fixed time more for each micro batch, because all hosts share the same processors.

crashes: one of four hosts, each but the driver's in turn, is gone and Slurm calls it down (SlurmdTimeout 5 s, MessageTimeout 1 s);
three go on. Slurm takes it from the job, so that it is back with the next one. driver-crashes: the driver's host is gone, and the
job's batch script with it: the job is queued again, and three go on in it from the newest checkpoint on disk. flaps: the link of a
living host is down for 5 to 20 s (SlurmdTimeout 30 s); no host may be taken for lost. drains, drains-spare: Slurm drains a host,
without and with a spare; nothing may be computed again. hour: in virtual time, a node fails every 20 minutes and is back after 10;
uneven layouts beside those in which replicas have equally many micro batches. Exit status 1 if a host was lost wrongly, or a step
computed twice.
"""

import argparse
import itertools
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import figures
from failing_hour import Failures, goodput, moments
from lab_job import LabJob, Line, lab_of, until

from chaos.lab.shape import SlurmTimes
from resilient import throughput
from resilient.config import Config, layout, layouts, load
from resilient.recovery.without_spare import Figures, decide

HOSTS = 4
MICRO_S = 0.2
GLOBAL_BATCH = 8
STEPS = 8  # whose time is a figure
PARTS = ("crashes", "driver-crashes", "flaps", "drains", "drains-spare", "hour")
HOUR_S = 3600.0
HOURS = 1000
# In the first of these Slurm calls a host down within some seconds, in the other it waits for one whose link is down for 20 s.
SOON = SlurmTimes(slurmd_timeout_s=5, kill_wait_s=5, grace_s=2, message_timeout_s=1)
PATIENT = SlurmTimes(slurmd_timeout_s=30, kill_wait_s=5, grace_s=2)
DURABLE_STEPS = 4  # between two checkpoints on disk, where the job of the driver's host begins anew
FENCE_S = 10.0  # without a word of the driver, before Slurm is asked about its host
PAUSE_S = 15.0  # for which all stand still when a node is lost or is back
FIT = "health check: "  # in the log of an agent that may take part
MEANING = "What a node costs that is lost, cut off or drained where none is to spare, with a real Slurm over hosts of a lab."
EXAMPLES = Path(__file__).parents[1] / "examples"
"""Configs whose layouts the hour is computed with, beside the lab's own."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--crashes", type=int, default=20)
    parser.add_argument("--driver-crashes", type=int, default=5)
    parser.add_argument("--flaps", type=int, default=50)
    parser.add_argument("--drains", type=int, default=10, help="of each of the two kinds")
    parser.add_argument("--seed", type=int, default=0)
    args = figures.arguments(parser)
    chance = random.Random(args.seed)
    found: list[figures.Figure] = []
    wrong: list[str] = []
    with tempfile.TemporaryDirectory(prefix="lost-nodes-") as scratch:
        for part in args.part:
            found += measured(part, Path(scratch), args, chance, wrong)
            figures.save(args.json, MEANING, found, error="; ".join(wrong))
    for each in wrong:
        say(f"WRONG: {each}")
    return int(bool(wrong))


def measured(part: str, directory: Path, args: argparse.Namespace, chance: random.Random, wrong: list[str]) -> list[figures.Figure]:
    """What one part has found. Args: wrong: takes sentences on what must not be."""
    match part:
        case "crashes":
            return crashes(directory, args.crashes)
        case "driver-crashes":
            return driver_crashes(directory, args.driver_crashes, wrong)
        case "flaps":
            return flaps(directory, args.flaps, chance, wrong)
        case "drains" | "drains-spare":
            return drains(directory, args.drains, int(part == "drains-spare"), wrong)
        case _:
            return hour(chance)


def say(text: str) -> None:
    print(text, flush=True)


def settings(nodes: int | str = HOSTS, *, spares: int = 0) -> dict[str, Any]:
    """The config of a campaign: snapshots in memory at every step with a copy on another host, on disk at the end of a job."""
    ram = {"name": "ram", "path": "/dev/shm", "every_steps": 1, "keep_last": 2, "replicas": 1}
    durable = {"name": "durable", "path": "${run_dir}/checkpoints", "keep_last": 2}
    return {
        "name": "lost-nodes",
        "entrypoint": "lost_nodes_entry:train",
        "args": {"micro_s": MICRO_S},
        "cluster": {"nodes": nodes, "spares": spares, "procs_per_node": 1, "threads_per_proc": 1, "device": "cpu", "min_nodes": 2},
        "model": {"layers": 2, "hidden": 64, "heads": 4, "seq_len": 64},
        "data": {"text": "auto", "tokenizer": {"vocab_size": 512}},
        "train": {
            "steps": 1_000_000,
            "global_batch_size": GLOBAL_BATCH,
            "micro_batch_size": 1,
            "eval_interval": 0,
            "compile": False,
        },
        "optimizer": {"warmup_samples": 320, "decay_samples": 1_000_000},
        "checkpoint": {"every_steps": 1_000_000, "tiers": [ram, durable]},
        "resilience": {"max_restarts_per_hour": 1000, "give_up_after_same_step": 1000},
    }


# -- a host that crashes -------------------------------------------------------------------------------------------------


def crashes(directory: Path, count: int) -> list[figures.Figure]:
    """A job for each: Slurm takes a host from the job that it calls down."""
    found = []
    with lab_of(HOSTS, SOON) as lab:
        run = LabJob(lab, directory / "crashes", settings())
        expected = rates_of(load(run.directory / "config.yaml"))  # as in the table of `resilient plan`
        for number in range(count):
            run.submit()
            host = f"n{2 + number % (HOSTS - 1)}"
            found.append(crash(run, host) | {"expected": expected[HOSTS - 1]})
            lab.boot(host)
            run.end()
            until(lambda: [each.state for each in lab.controller.nodes()] == ["idle"] * HOSTS, "Slurm to take the host back")
    return [*shown(found), *rates(found)]


def crash(run: LabJob, host: str) -> Line:
    """Crash a host once all go on, and see three go on: what it took, in seconds."""
    until(lambda: len(run.members()) == HOSTS, lambda: f"four hosts\n{run.told()}")
    run.goes_on(STEPS)
    before = run.step()
    until(lambda: run.replicated(before), lambda: f"copies of step {before}\n{run.told()}")
    full_s = step_s(run)
    last, began = run.step(), time.time()
    run.lab.crash(host)
    fewer = until(lambda: next(starts(run, began, HOSTS - 1), None), lambda: f"three hosts\n{run.told()}")
    first = until(lambda: first_of(run, fewer["generation"]), lambda: f"a step on three hosts\n{run.told()}")
    fault = next(each for each in run.events("fault", began) if each["kind"] == "node_lost")
    run.goes_on(STEPS)
    took: Line = {
        "step_s": round(first["t"] - began, 2),
        "fault_s": round(fault["t"] - began, 2),
        "full": full_s,
        "fewer": step_s(run),
    }
    took |= {"lost": max(0, last - fewer["resumed_step"]), "tier": fewer["tier"], "evidence": fault.get("evidence")}
    say(f"  {host}: {took}")
    return took


def starts(run: LabJob, since: float, hosts: int) -> Iterator[Line]:
    """The generations of so many hosts that have begun since then."""
    return (each for each in run.events("generation_started", since) if len(each["nodes"]) == hosts)


def first_of(run: LabJob, generation: int) -> Line | None:
    """The first step of a generation or a later one."""
    return next((line for line in run.metrics() if line["generation"] >= generation), None)


def step_s(run: LabJob) -> float:
    """Seconds of a step, by when the last ones were finished."""
    ends = [line["t"] for line in run.metrics()[-STEPS:]]
    return statistics.median(later - earlier for earlier, later in itertools.pairwise(ends))


def rates_of(config: Config, *, even: bool = False) -> dict[int, float]:
    """The rate of training by number of nodes left.

    Args:
        even: only layouts whose replicas have equally many micro batches; where `parallel.dp` is a number, the whole one.
    """
    whole = layout(config, cpu_count=1, gpu_count=0, apart=True)
    fastest = throughput.passes_of_a_step(config, whole)
    found = layouts(config, whole)
    if even:
        may_differ = config.parallel.dp == "auto"
        found = {nodes: each for nodes, each in found.items() if each.fuller == each.dp and (may_differ or nodes == whole.nodes)}
    return {nodes: fastest / throughput.passes_of_a_step(config, each) for nodes, each in found.items()}


def shown(found: Sequence[Line]) -> list[figures.Figure]:
    """What crashes took, printed and as figures."""
    seconds, certain = [each["step_s"] for each in found], [each["fault_s"] for each in found]
    show("crashes: host gone, to the next step on three", seconds)
    show("  of it until the loss is certain", certain)
    show("  and from there to that step", [each["step_s"] - each["fault_s"] for each in found])
    say(f"  steps computed again: {sorted(each['lost'] for each in found)}; from {dict(Counter(each['tier'] for each in found))}")
    return [
        figures.figure("crashes", "host crashed and none to spare, to the next step on three of four", "s", seconds),
        figures.figure("crashes/certain", "of it until the loss is certain", "s", certain),
        figures.figure("crashes/lost", "steps computed again after that", "steps", [each["lost"] for each in found]),
    ]


def rates(found: Sequence[Line]) -> list[figures.Figure]:
    """Throughput with three of four hosts beside what the plan says."""
    measured, expected = [each["full"] / each["fewer"] for each in found], [each["expected"] for each in found]
    ratio = [one / other for one, other in zip(measured, expected, strict=True)]
    say(f"throughput with three of four: {statistics.median(measured):.3f}, by the plan {expected[0]:.3f}, ratio {spread(ratio)}")
    words = "throughput with three of four hosts, of that with four"
    return [figures.figure("throughput", words, "", measured, "what `plan` says", expected, paired=True)]


def show(what: str, seconds: Sequence[float]) -> None:
    say(f"{what}: {spread(seconds)} s ({len(seconds)} times)")


def spread(values: Sequence[float]) -> str:
    return f"median {statistics.median(values):.2f}, {min(values):.2f} to {max(values):.2f}"


# -- the driver's host ---------------------------------------------------------------------------------------------------


def driver_crashes(directory: Path, count: int, wrong: list[str]) -> list[figures.Figure]:
    """A job for each, of as many nodes as there are; Slurm puts it back into the queue when its batch host is lost."""
    config = settings("auto")
    config["checkpoint"]["tiers"][1]["every_steps"] = DURABLE_STEPS
    config |= {"slurm": {"requeue": True}, "resilience": {**config["resilience"], "fence_s": FENCE_S, "link_grace_s": FENCE_S}}
    found: list[Line] = []
    with lab_of(HOSTS, SOON) as lab:
        run = LabJob(lab, directory / "driver", config)
        for _ in range(count):
            run.submit(nodes=f"{HOSTS - 1}-{HOSTS}", options=["--requeue"])
            found.append(driver_crash(run))
            lab.boot("n1")
            run.end()
            until(lambda: [each.state for each in lab.controller.nodes()] == ["idle"] * HOSTS, "Slurm to take the host back")
    if any("n1" in each["members"] or len(each["members"]) != HOSTS - 1 for each in found):
        wrong.append("others than the three hosts that were left went on")
    show("driver's host gone, to the next step on three in the job's next start", [each["step_s"] for each in found])
    say(f"  steps computed again: {sorted(each['lost'] for each in found)}")
    return [
        figures.figure(
            "driver",
            "driver's host crashed, to the next step on three of four in the same job",
            "s",
            [each["step_s"] for each in found],
        ),
        figures.figure("driver/lost", "steps computed again after that", "steps", [each["lost"] for each in found]),
    ]


def driver_crash(run: LabJob) -> Line:
    """Crash the batch host once all go on, and see the others go on without it."""
    until(lambda: len(run.members()) == HOSTS, lambda: f"four hosts\n{run.told()}")
    run.goes_on(2 * DURABLE_STEPS)
    last, began = run.step(), time.time()
    run.lab.crash("n1")
    until(run.is_queued, lambda: f"the job to be in the queue again\n{run.told()}")
    queued_s = time.time() - began
    run.start_now()
    fewer = until(lambda: next(starts(run, began, HOSTS - 1), None), lambda: f"three hosts\n{run.told()}")
    first = until(lambda: first_of(run, fewer["generation"]), lambda: f"a step on three hosts\n{run.told()}")
    run.goes_on(STEPS)
    took: Line = {"step_s": round(first["t"] - began, 2), "queued_s": round(queued_s, 2), "members": fewer["nodes"]}
    took |= {"lost": max(0, last - fewer["resumed_step"]), "tier": fewer["tier"]}
    say(f"  n1: {took}")
    return took


# -- a host that lives ---------------------------------------------------------------------------------------------------


def flaps(directory: Path, count: int, chance: random.Random, wrong: list[str]) -> list[figures.Figure]:
    """One job, whose hosts' links are down in turn."""
    stalls: list[float] = []
    with lab_of(HOSTS, PATIENT) as lab:
        run = LabJob(lab, directory / "flaps", settings())
        run.submit()
        for number in range(count):
            run.goes_on(3)
            host, seconds = f"n{1 + number % HOSTS}", chance.uniform(5, 20)
            lab.flap(host, seconds)
            back = time.time()
            line = until(lambda back=back: next((each for each in run.metrics() if each["t"] > back), None), "a step")
            stalls.append(line["t"] - back)
            say(f"  {host} down for {seconds:.1f} s, then {stalls[-1]:.1f} s to the next step")
        run.end()
        faults = Counter(each["kind"] for each in run.events("fault"))
        restarts, twice = len(run.events("generation_started")) - 1, again(run)
    lost = faults["node_lost"]
    show("link back, to the next step", stalls)
    say(f"flaps: {count}, hosts declared lost: {lost}, restarts: {restarts}, steps computed again: {twice}, faults: {dict(faults)}")
    if lost:
        wrong.append(f"{lost} hosts whose links flapped were declared lost")
    return [
        figures.figure("flaps/lost", f"hosts declared lost in {count} flaps of 5 to 20 s", "", [lost]),
        figures.figure("flaps/restarts", "restarts in them", "", [restarts]),
        figures.figure("flaps/stall", "link back, to the next step", "s", stalls),
    ]


def again(run: LabJob) -> int:
    """Steps that were computed more than once."""
    return sum(times - 1 for times in Counter(line["step"] for line in run.metrics()).values())


# -- a host that Slurm drains --------------------------------------------------------------------------------------------


def drains(directory: Path, count: int, spares: int, wrong: list[str]) -> list[figures.Figure]:
    """One job, whose hosts but the driver's are drained in turn, and resumed."""
    name, words = ("drains/spare", "with a spare") if spares else ("drains", "without a spare")
    nodes = HOSTS - spares
    left_s: list[float] = []
    freed_s: list[float] = []
    with lab_of(HOSTS, PATIENT) as lab:
        run = LabJob(lab, directory / f"drains{spares}", settings(nodes, spares=spares))
        run.submit()
        for number in range(count):
            run.goes_on(3)
            host = run.members()[1 + number % (nodes - 1)]
            at, free_s = drain(run, host)
            say(f"  {host}: left after {at:.1f} s, free {free_s:.1f} s after that")
            left_s.append(at)
            freed_s.append(free_s)
            taken_in(run, host, nodes)
        run.end()
        twice, faults = again(run), Counter(each["kind"] for each in run.events("fault"))
        other = others(run, directory / "calm") if spares else 0
    show(f"drained {words}: scontrol, until the host is left (Slurm is asked every 30 s)", left_s)
    show(f"drained {words}: from then until it is free", freed_s)
    say(f"drained {words}: steps computed again: {twice} of {run.step()}, faults: {dict(faults)}")
    if spares:
        say(f"losses other than those of a run in which nothing happens: {other} of {run.step()}")
    wrong += [f"{twice} steps were computed again, drained {words}"] * bool(twice)
    wrong += [f"{other} losses are not those of a run in which nothing happens"] * bool(other)
    found = [
        figures.figure(f"{name}/again", f"steps computed again in {count} drains {words}", "steps", [twice]),
        figures.figure(f"{name}/free", f"host left {words}, until nothing of the campaign is on it", "s", freed_s),
    ]
    calm = figures.figure(f"{name}/other", "losses that differ from those of a run without drains", "", [other])
    return [*found, calm] if spares else found


def drain(run: LabJob, host: str) -> tuple[float, float]:
    """Have Slurm drain a host: seconds until it is left, and from then until it is free."""
    began = time.time()
    run.scontrol("update", f"NodeName={host}", "State=DRAIN", "Reason=benchmark")
    gone = until(lambda: next(left(run, began), None), lambda: f"{host} to be left\n{run.told()}")
    until(lambda: run.is_free(host), lambda: f"{host} to be free\n{run.told()}")
    free_t = time.time()
    until(lambda: host not in run.members(), lambda: f"a generation without {host}\n{run.told()}")
    run.goes_on(3)
    return gone["t"] - began, free_t - gone["t"]


def left(run: LabJob, since: float) -> Iterator[Line]:
    """When a host was left since then because it is to go."""
    return (each for each in run.events("action", since) if each["name"] == "evacuate")


def taken_in(run: LabJob, host: str, nodes: int) -> None:
    """Have Slurm use a host again, and wait until an agent on it may take part, and as many hosts as wanted do."""
    log = run.run_dir / f"logs/agent{int(host[1:]) - 1}.log"
    fit = log.read_text().count(FIT)
    run.scontrol("update", f"NodeName={host}", "State=RESUME")
    until(lambda: log.read_text().count(FIT) > fit, lambda: f"an agent on {host}\n{run.told()}")
    until(lambda: len(run.members()) == nodes, lambda: f"{nodes} hosts\n{run.told()}")


def others(run: LabJob, directory: Path) -> int:
    """In how many steps the loss is another one than, to the last bit, that of the same campaign in which nothing happens."""
    calm = LabJob(run.lab, directory, {**run.config, "args": {"micro_s": 0.0}})
    calm.alone(run.step())
    undisturbed = {line["step"]: repr(line["loss"]) for line in calm.metrics()}
    return sum(undisturbed[line["step"]] != repr(line["loss"]) for line in run.metrics())


# -- an hour in virtual time ---------------------------------------------------------------------------------------------


def hour(chance: random.Random) -> list[figures.Figure]:
    """Of each campaign the goodput of an hour, in many hours that differ by chance; even layouts see the same failures."""
    found = []
    environ = {"SCRATCH": "/scratch", "PROJECT": "/project", "USER": "user", **os.environ}
    campaigns = {"lab": Config.model_validate(settings() | {"run_dir": "/none"})}
    campaigns |= {name: load(EXAMPLES / f"{name}.yaml", environ=environ) for name in ("teuken-7b", "13b-juwels")}
    failures = Failures(every_s=1200.0, back_s=600.0, pause_s=PAUSE_S)
    for name, config in campaigns.items():
        uneven, even = rates_of(config), rates_of(config, even=True)
        nodes = max(uneven)
        hours = [moments(failures, HOUR_S, chance) for _ in range(HOURS)]
        ours = [100 * goodput(nodes, uneven, each, failures, HOUR_S) for each in hours]
        theirs = [100 * goodput(nodes, even, each, failures, HOUR_S) for each in hours]
        fewer = max((each for each in even if each < nodes), default=0)
        known = Figures(nodes, nodes - 1, uneven[nodes - 1], (failures.back_s,), failures.pause_s, HOUR_S)
        say(f"hour, {name}: one of {nodes} nodes lost: {decide('auto', known).reason}; of even layouts {fewer or 'none'} would")
        say(f"  goodput: uneven {spread(ours)} %, even {spread(theirs)} % ({HOURS} hours)")
        words = f"goodput of an hour in which a node fails every 20 minutes, {nodes} nodes"
        found.append(
            figures.figure(f"hour/{name}", words, "%", ours, "even layouts only", theirs, paired=True, note="in virtual time")
        )
    return found


if __name__ == "__main__":
    sys.exit(main())
