"""A node killed, with all that runs on it and all it holds in memory: time to the next finished step, with and without a spare.

    python benchmarks/nodes.py [--rounds 20] [--json FILE]

With a spare at hand it takes over; without one the run shrinks, and grows again when the node is back. Two nodes of one rank each,
snapshots in memory at every step with a copy on the other node.
"""

import argparse
import contextlib
import random
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import figures
import psutil
from launchers import Resilient, make

CONFIG = """
name: nodes
run_dir: {directory}/run
cluster: {{nodes: 2, procs_per_node: 1, spares: {spares}}}
model: {{layers: 4, hidden: 128, heads: 4, seq_len: 128}}
data: {{text: auto, tokenizer: {{vocab_size: 2048}}}}
train: {{steps: 1000000, global_batch_size: 8, micro_batch_size: 4, eval_interval: 0}}
optimizer: {{warmup_samples: 320, decay_samples: 1000000}}
checkpoint:
  every_steps: 50
  tiers:
    - {{name: ram, path: {memory}, keep_last: 2, replicas: 1}}
    - {{name: durable, path: {directory}/run/checkpoints}}
resilience: {{max_restarts_per_hour: 100000, give_up_after_same_step: 100000, rejoin_s: {rejoin_s}}}
"""
PATIENCE_S = 120.0
MEANING = "How long training stands still when a node is lost with all that it holds in memory, with and without a spare at hand."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = figures.arguments(parser)
    chance = random.Random(args.seed)
    taken_over = campaign(chance, args.rounds, spares=1)
    show("killed, with a spare: to the next step", [each["step_s"] for each in taken_over])
    print(f"  went on from memory: {sum(each['tier'] == 'ram' for each in taken_over)} of {len(taken_over)}")
    print(f"  steps computed again: {sorted(each['lost'] for each in taken_over)}")
    shrunk = campaign(chance, args.rounds, spares=0)
    show("killed, without a spare: to the next step on fewer nodes", [each["step_s"] for each in shrunk])
    show("from the return of the node to the next step on all nodes", [each["grown_s"] for each in shrunk])
    print(f"  steps computed again: {sorted(each['lost'] for each in shrunk)}")
    in_memory = [100 * sum(each["tier"] == "ram" for each in taken_over) / len(taken_over)]
    found = [
        figures.figure("spare", "node killed, to the next step on its spare", "s", [each["step_s"] for each in taken_over]),
        figures.figure("spare/lost", "steps computed again after that", "steps", [each["lost"] for each in taken_over]),
        figures.figure("spare/memory", "went on from a copy in memory", "%", in_memory),
        figures.figure(
            "shrink", "node killed without a spare, to the next step on fewer nodes", "s", [e["step_s"] for e in shrunk]
        ),
        figures.figure("shrink/lost", "steps computed again after that", "steps", [each["lost"] for each in shrunk]),
        figures.figure(
            "grow", "node back, to the next step on all nodes", "s", [each["grown_s"] for each in shrunk if "grown_s" in each]
        ),
    ]
    figures.save(args.json, MEANING, found)


def show(what: str, seconds: list[float]) -> None:
    print(f"{what}: median {statistics.median(seconds):.2f} s, worst {max(seconds):.2f} s ({len(seconds)} times)", flush=True)


def campaign(chance: random.Random, rounds: int, *, spares: int) -> list[dict[str, Any]]:
    """One run in which a node is killed so often; what each time took."""
    memory = Path(tempfile.mkdtemp(prefix="nodes-", dir="/dev/shm"))
    with tempfile.TemporaryDirectory(prefix="nodes-") as scratch:
        directory = Path(scratch)
        config = directory / "config.yaml"
        config.write_text(CONFIG.format(directory=directory, memory=memory, spares=spares, rejoin_s=30 if spares else 0))
        run = make("resilient", config, directory / "run", 2, None)
        assert isinstance(run, Resilient)
        try:
            run.start()
            return [crash(run, chance, memory, 2 + spares) for _ in range(rounds)]
        finally:
            run.stop()
            shutil.rmtree(memory, ignore_errors=True)


def crash(run: Resilient, chance: random.Random, memory: Path, nodes: int) -> dict[str, Any]:
    """Kill a node of the present generation, once all nodes are there and the newest steps have copies."""
    started = until(lambda: whole(run, nodes))
    since = started["resumed_step"] or 0
    until(lambda: replicated(memory, since))
    time.sleep(chance.uniform(0.2, 1.0))
    found = run.agents()
    node = chance.choice([node for node, agent in found.items() if any(memory.glob(f"*/node{node}/step-*")) and agent.children()])
    before = run.newest()
    family = found[node].children(recursive=True)
    found[node].suspend()
    for process in family:
        process.suspend()
    began = time.time()
    for process in (*family, found[node]):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    for held in memory.glob(f"*/node{node}"):
        shutil.rmtree(held, ignore_errors=True)
    after = run.wait(lambda line: line["generation"] > before["generation"])
    generation = next(line for line in run.events("generation_started") if line["generation"] == after["generation"])
    done: dict[str, Any] = {"step_s": after["t"] - began, "tier": generation["tier"]}
    done["lost"] = max(0, before["step"] - (generation["resumed_step"] or 0))
    if len(generation["nodes"]) == 1:
        grown = until(lambda: next((line for line in run.events("action") if line["name"] == "grow" and line["t"] > began), None))
        done["grown_s"] = run.wait(lambda line: line["generation"] > grown["generation"])["t"] - grown["t"]
    return done


def whole(run: Resilient, nodes: int) -> dict[str, Any] | None:
    """The generation that runs, once it has two nodes and has recovered, and every agent that is there was checked."""
    started = run.events("generation_started")
    if not started or len(started[-1]["nodes"]) < 2 or run.newest()["generation"] < started[-1]["generation"]:
        return None
    found = run.agents()
    well = all(len(agent.children()) >= 2 and checked(run, node) for node, agent in found.items())
    return started[-1] if len(found) == nodes and well else None


def checked(run: Resilient, node: int) -> bool:
    """Whether the newest agent of a node has found it fit, and said so."""
    log = (run.run_dir / f"logs/agent{node}.log").read_text()
    return "health check: " in log.rpartition("watching the links")[2]


def replicated(memory: Path, since: int) -> bool:
    """Whether nodes have copies of both parts of a step after this one."""
    newest: dict[str, int] = {}
    for path in memory.glob("*/node*/replica-*/step-????????/part.json"):
        name, step = path.parts[-3], int(path.parts[-2][5:])
        newest[name] = max(newest.get(name, 0), step)
    return len(newest) == 2 and min(newest.values()) > since


def until(condition: Any) -> Any:
    """What the condition gives once it gives something."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError("waited in vain")
        time.sleep(0.05)
    return found


if __name__ == "__main__":
    main()
