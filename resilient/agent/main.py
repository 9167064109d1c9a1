"""Start-up of an agent process: arguments, fork server first (its imports take longest), then the connection, then the loop."""

import argparse
import logging
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from resilient import clock, entry
from resilient.agent.workers import start_fork_server
from resilient.lifeline import die_with_parent
from resilient.slurm.headless import see_to_the_job
from resilient.wire import TOKEN_VARIABLE, Connection, parse_addresses

if TYPE_CHECKING:
    from resilient.agent.agent import AgentSettings

CONNECT_S = 30.0
# c10d asks for the name of every address that it connects to, for its log; where nobody answers, that takes longer with the
# resolver's own 5 s than it has for the connection. For workers, too.
RESOLVER = "timeout:1 attempts:2"


def main() -> int:
    """Run an agent until the driver ends the run, is gone, or has been silent for too long."""
    parser = argparse.ArgumentParser(prog="python -m resilient.agent", description=__doc__)
    parser.add_argument("--driver", required=True, metavar="HOST:PORT[,…]", help="addresses of the driver, best first")
    parser.add_argument("--node", type=int, required=True, help="index of this node")
    parser.add_argument("--procs", type=int, required=True, help="workers on this node")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--entrypoint", required=True, metavar="ENTRYPOINT")
    parser.add_argument("--fence-s", type=float, required=True)
    parser.add_argument("--health-s", type=float, default=0.0, help="what the check of this node may take; 0: none is made")
    parser.add_argument("--world", type=int, default=1, help="ranks of all nodes")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="what ranks compute on")
    parser.add_argument("--addr", help="address at which the other nodes reach this one; else the one that leads to the driver")
    parser.add_argument("--parent", type=int, help="end when this parent process does")
    parser.add_argument("--log-level", default="INFO")
    args = parser.parse_args()
    if args.parent is not None:
        # Not SIGKILL: an agent that has lost its driver ends its workers and keeps what they have reported.
        die_with_parent(args.parent, signal.SIGTERM)
    logging.basicConfig(level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("torch").setLevel(logging.WARNING)
    token = os.environ.pop(TOKEN_VARIABLE, "")  # for this process alone, not for what it starts
    os.environ.setdefault("RES_OPTIONS", RESOLVER)
    os.environ.update(clock.environment())  # on a machine of its own, an agent and its workers go by one clock
    start_fork_server(entry.ahead(entry.parse(args.entrypoint)))

    # All ranks of the group are alike, which spares torchelastic a round through the store.
    os.environ["TORCH_ELASTIC_WORKER_IDENTICAL"] = "1"
    from resilient.agent.agent import NodeAgent  # imports torch, while the fork server does the same

    with Connection(parse_addresses(args.driver), timeout_s=CONNECT_S) as connection:
        agent = NodeAgent(_settings(args, token, args.addr or connection.own_address()), connection)
        agent.run()
    if agent.fenced:
        see_to_the_job(os.environ)
    return 0


def _settings(args: argparse.Namespace, token: str, addr: str) -> "AgentSettings":
    from resilient.agent.agent import AgentSettings

    return AgentSettings(
        node=args.node,
        procs=args.procs,
        run_dir=args.run_dir,
        run_id=args.run_id,
        entrypoint=args.entrypoint,
        fence_s=args.fence_s,
        health_s=args.health_s,
        world=args.world,
        device=args.device,
        token=token,
        addr=addr,
    )
