"""What the control plane costs at the size of a large machine: a real driver, real TCP, and simulated agents.

    python benchmarks/control_plane.py [--ranks 16384] [--seconds 20] [--deaths 3] [--json FILE]

The driver is the real one, in a process of its own, with a launcher that starts nothing. Simulated agents of eight ranks each
connect to it and speak as real ones do: hello, ready, and then once a step of a second a report with the heartbeats of their ranks
and the snapshot that they hold; they fetch replicas when they are told to. A rank dies a few times, and all are started anew.

Measured are the driver's processor time and memory while nothing happens but that, processor time for each message that it
receives, the time from a rank's death until the last node was told to start, and from the first hello until the last node was.
The last line is a JSON object. Driver and agents have a core each; what the agents cost is not the driver's.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import figures
import psutil
from simulated_agents import PROCS, own_core  # which takes this folder off the path

MEANING = "What the control plane costs at the size of a large machine: a real driver and simulated agents of eight ranks each."
SETTLE_S = 5.0  # after a start, before anything is measured or broken
CONFIG = """
name: control-plane
run_dir: {directory}/run
entrypoint: {directory}/none.py
cluster: {{launcher: local, nodes: {nodes}, procs_per_node: {procs}, threads_per_proc: 1, device: cpu}}
parallel: {{tp: {procs}}}
data: {{path: {directory}/none}}
model: {{vocab_size: 256, layers: 8, hidden: 512, heads: 8, seq_len: 128}}
train: {{steps: 1000000, global_batch_size: {nodes}, micro_batch_size: 1, precision: fp32}}
checkpoint:
  every_steps: 1000000
  tiers:
    - {{name: ram, path: {directory}/ram, every_steps: 1, keep_last: 2, replicas: 1}}
    - {{name: scratch, path: {directory}/scratch, keep_last: 2}}
logging: {{progress: none}}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=16384)
    parser.add_argument("--seconds", type=float, default=20.0, help="of undisturbed steps that are measured")
    parser.add_argument("--deaths", type=int, default=3, help="of ranks, one after the other")
    parser.add_argument("--driver", type=Path, help=argparse.SUPPRESS)
    args = figures.arguments(parser)
    if args.driver is not None:
        drive(args.driver)
    else:
        found = measure(args)
        named = {
            "driver_cpu_share": ("of a core, for the driver", ""),
            "rss_mib": ("memory of the driver", "MiB"),
            "us_per_message": ("processor time of the driver for each message", "us"),
            "death_to_last_start_s": ("a rank's death to the last `start`", "s"),
            "hello_to_first_start_s": ("the first hello to the last `start` of the first generation", "s"),
        }
        figures.save(
            args.json,
            MEANING,
            [figures.figure(name, f"{what}, {args.ranks} ranks", unit, [found[name]]) for name, (what, unit) in named.items()],
        )
        sys.stdout.write(json.dumps({"ranks": args.ranks, **found}) + "\n")


# -- the measurement -----------------------------------------------------------------------------------------------------


def measure(args: argparse.Namespace) -> dict[str, float]:
    nodes = args.ranks // PROCS
    with tempfile.TemporaryDirectory(prefix="control-plane-") as scratch:
        directory = Path(scratch)
        (directory / "none.py").write_text("")
        (directory / "config.yaml").write_text(CONFIG.format(directory=directory, nodes=nodes, procs=PROCS))
        log = (directory / "driver.log").open("w")
        this = Path(__file__)
        driver = subprocess.Popen([sys.executable, this, "--driver", directory], stdout=log, stderr=log)
        agents = subprocess.Popen(
            [sys.executable, this.with_name("simulated_agents.py"), directory, str(nodes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        threading.Thread(target=_end_with, args=(driver, agents), daemon=True).start()
        try:
            return _measured(args, Simulated(agents), psutil.Process(driver.pid))
        except BaseException:
            log.flush()
            sys.stderr.write((directory / "driver.log").read_text()[-8000:])
            raise
        finally:
            for process in (agents, driver):
                process.kill()
                process.wait()
            log.close()


def _end_with(driver: subprocess.Popen[Any], agents: subprocess.Popen[str]) -> None:
    """Without a driver nobody has anything to wait for."""
    driver.wait()
    agents.kill()


class Simulated:
    """The process of simulated agents, as the measurement sees it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def next(self, wanted: str) -> dict[str, Any]:
        """The next line of that kind."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            told: dict[str, Any] = json.loads(line)
            if told["what"] == wanted:
                return told
            if told["what"] == "lost":
                raise SystemExit(f"the driver has closed the connection of node {told['node']}")
        raise SystemExit("the simulated agents have ended")

    def ask(self, command: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()


def _measured(args: argparse.Namespace, agents: Simulated, driver: psutil.Process) -> dict[str, float]:
    started = agents.next("all_started")
    hello_s = started["last_t"] - started["hello_t"]
    time.sleep(SETTLE_S)  # until agents have sent what a start brings
    agents.ask("count")
    before, spent, began = agents.next("count"), _spent_s(driver), time.monotonic()
    time.sleep(args.seconds)  # undisturbed steps, which are measured
    agents.ask("count")
    after, spent, took = agents.next("count"), _spent_s(driver) - spent, time.monotonic() - began
    rss = driver.memory_info().rss
    deaths = []
    for number in range(args.deaths):
        agents.ask(f"kill {(number * 7919 + 3) % (args.ranks // PROCS)}")
        spent_s = _spent_s(driver)
        killed, started = agents.next("killed"), agents.next("all_started")
        first_s, last_s = started["first_t"] - killed["t"], started["last_t"] - killed["t"]
        spent_s = _spent_s(driver) - spent_s
        sys.stdout.write(f"death: first start after {first_s:.2f} s, last {last_s:.2f}; the driver computed {spent_s:.2f} s\n")
        deaths.append(started["last_t"] - killed["t"])
        rss = max(rss, driver.memory_info().rss)
        time.sleep(SETTLE_S)  # until agents have sent what a start brings
    agents.ask("count")
    last = agents.next("count")
    if last["steps"] <= after["steps"] or last["generation"] != 1 + args.deaths:
        raise SystemExit(f"the run did not go on as it should: {last}")
    received = after["sent"] - before["sent"]
    sys.stdout.write(
        f"{args.ranks} ranks, {args.ranks // PROCS} nodes: {received / took:,.0f} messages/s received, "
        f"{(after['received'] - before['received']) / took:,.0f} sent, {(after['steps'] - before['steps']) / took:.2f} steps/s\n"
    )
    return {
        "driver_cpu_share": round(spent / took, 4),
        "rss_mib": round(rss / 2**20, 1),
        "us_per_message": round(1e6 * spent / received, 2),
        "death_to_last_start_s": round(statistics.median(deaths), 3) if deaths else 0.0,
        "hello_to_first_start_s": round(hello_s, 3),
    }


def _spent_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


# -- the driver's process ------------------------------------------------------------------------------------------------


def drive(directory: Path) -> None:
    """The real driver, with agents that somebody else starts."""
    own_core(0)
    from rich.console import Console

    from resilient.campaign import machine_layout
    from resilient.config import load
    from resilient.driver import agents, campaign
    from resilient.driver.display import Display

    class NobodyStarts:
        addr = "127.0.0.1"

        def __init__(self, command: Any, *_: Any) -> None:
            new = directory / "driver.new"
            new.write_text(json.dumps({"driver": command.driver, "token": command.token}))
            new.rename(directory / "driver.json")

        async def launch(self, node: int, incarnation: int, *, prepare: bool) -> None:
            pass

        def connected(self, node: int) -> None:
            pass

        async def close(self, grace_s: float) -> None:
            pass

    agents.LocalLauncher = NobodyStarts  # type: ignore[misc, assignment]
    config = load(directory / "config.yaml", [])
    code, message, _ = campaign.run_campaign(
        config, machine_layout(config), Display("none", config.train.steps, console=Console(stderr=True))
    )
    sys.stdout.write(f"{code!r}: {message}\n")


if __name__ == "__main__":
    main()
