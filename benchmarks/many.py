"""Many nodes as processes of one machine: does the runtime hold them together, and what do they cost?

    python benchmarks/many.py [--agents 64] [--kills 3] [--rejoin-s 60] [--json FILE]

Every agent has one rank, which takes part in an all-reduce (gloo) and sleeps; a step takes at least a second. Ranks are killed,
then whole agents with all they have, which are started anew. An agent with its fork server and its rank has about 0.45 GB, most
of it PyTorch twice, which processes that were started apart do not share: 64 of them need 30 GB of memory and swap.
"""

import argparse
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import figures
import psutil
from launchers import Launcher, Resilient, make

from resilient.agent.memory import region_directory
from resilient.heartbeat.region import peek

SCRIPT = """
import time

import torch
import torch.distributed as dist
from resilient import worker

rank, step = worker.init().rank, 0
dist.init_process_group("gloo")
while worker.should_stop() is None:
    began = time.time()
    with worker.phase("step"):
        dist.all_reduce(torch.ones(1))
        time.sleep(1.0)  # stands for what a step computes
    step += 1
    if rank == 0:
        worker.report({{"step": step, "step_s": time.time() - began, "loss": 1.0}})
    worker.beat(step)
"""
CONFIG = """
name: many
run_dir: {directory}/run
entrypoint: {directory}/script.py
cluster: {{nodes: {agents}, procs_per_node: 1, threads_per_proc: 1, device: cpu}}
data: {{path: {directory}/none}}
model: {{vocab_size: 256}}
train: {{steps: 1000000, global_batch_size: {agents}, micro_batch_size: 1}}
resilience: {{max_restarts_per_hour: 1000, give_up_after_same_step: 1000, rejoin_s: {rejoin_s}}}
"""
WATCHED_S = 30.0
MEANING = (
    "Whether one driver holds many nodes together, and what it and an agent cost then; all nodes are processes of this machine."
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=64)
    parser.add_argument("--kills", type=int, default=3, help="of ranks, and as many of agents")
    parser.add_argument("--rejoin-s", type=float, default=60, help="for how long a node that is gone is waited for; 0: fewer go on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--watched-s", type=float, default=WATCHED_S, help="for how long the cost is measured, after as long a wait"
    )
    args = figures.arguments(parser)
    chance = random.Random(args.seed)
    Launcher.patience_s = 900.0
    with tempfile.TemporaryDirectory(prefix="many-") as scratch:
        directory = Path(scratch)
        (directory / "script.py").write_text(SCRIPT.format())
        config = directory / "config.yaml"
        config.write_text(CONFIG.format(directory=directory, agents=args.agents, rejoin_s=args.rejoin_s))
        run = make("resilient", config, directory / "run", args.agents, None)
        assert isinstance(run, Resilient)
        try:
            began = time.time()
            run.start()
            started_s = time.time() - began
            say(f"{args.agents} agents: first step {started_s:.0f} s after the start")
            found = [figures.figure("start", f"command to the first finished step of {args.agents} nodes", "s", [started_s])]
            found += cost(run, args.agents, args.watched_s)
            ranks = [kill_rank(run, chance) for _ in range(args.kills)]
            agents = [kill_agent(run, chance) for _ in range(args.kills)]
            if args.kills:
                found.append(figures.figure("rank", "`kill -9` of a rank to the next step of all", "s", ranks))
                found.append(figures.figure("node", "a node's processes killed, to the next step", "s", agents))
            began = time.time()
            status = run.drain()
            say(f"drained in {time.time() - began:.1f} s, exit status {status}")
            found.append(figures.figure("drain", "SIGTERM to the end of the command", "s", [time.time() - began]))
            error = "" if status == 75 else f"the drain ended with status {status}"
            figures.save(args.json, MEANING, found, error=error)
        finally:
            run.stop()


def cost(run: Resilient, count: int, watched_s: float) -> list[figures.Figure]:
    """What driver and agents use of a core while nothing happens."""
    time.sleep(watched_s)  # until the start is over
    before, began = {p.pid: busy(p) for p in run.family()}, time.monotonic()
    time.sleep(watched_s)  # what is measured
    took, steps = time.monotonic() - began, run.newest()["step"]
    family = run.family()
    agents = [busy(p) - before[p.pid] for p in run.agents().values() if p.pid in before]
    driver = busy(family[0]) - before[family[0].pid]
    held = sum(memory(p) for p in family) / count
    say(f"step {steps}; driver {100 * driver / took:.1f} % of a core, an agent {100 * sum(agents) / len(agents) / took:.2f} %")
    say(f"{held / 2**20:.0f} MiB an agent with all that is below it, in memory or swap")
    return [
        figures.figure("driver", "driver, of a core, while nothing happens", "%", [100 * driver / took]),
        figures.figure("agent", "an agent, of a core, while nothing happens", "%", [100 * each / took for each in agents]),
        figures.figure("memory", "memory of a node's runtime with one idle rank", "MiB", [held / 2**20]),
    ]


def busy(process: psutil.Process) -> float:
    with contextlib.suppress(psutil.NoSuchProcess):
        times = process.cpu_times()
        return float(times.user + times.system)
    return 0.0


def memory(process: psutil.Process) -> int:
    with contextlib.suppress(psutil.NoSuchProcess):
        full = process.memory_full_info()
        return int(full.pss + full.swap)
    return 0


def rank_of(run: Resilient, node: int) -> int:
    """The process id of a node's rank."""
    regions = [path for path in region_directory(run.run_dir, node).glob("g*-rank*") if path.suffix == ""]
    return peek(max(regions, key=lambda path: path.stat().st_mtime)).pid


def kill_rank(run: Resilient, chance: random.Random) -> float:
    before = run.newest()
    node = chance.choice(sorted(run.agents()))
    began = time.time()
    os.kill(rank_of(run, node), signal.SIGKILL)
    line = run.wait(lambda line: line["generation"] > before["generation"])
    took_s = float(line["t"] - line["step_s"] - began)
    say(f"rank of node {node} killed: {took_s:.1f} s to the next step")
    return took_s


def kill_agent(run: Resilient, chance: random.Random) -> float:
    before = run.newest()
    node, agent = chance.choice(sorted(run.agents().items()))
    family = agent.children(recursive=True)
    began = time.time()
    for process in (agent, *family):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    line = run.wait(lambda line: line["generation"] > before["generation"])
    world = run.events("generation_started")[-1]["world_size"]
    took_s = float(line["t"] - line["step_s"] - began)
    say(f"node {node} killed: {took_s:.1f} s to the next step, on {world} ranks")
    return took_s


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
