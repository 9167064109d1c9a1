"""Start-up of an agent process: arguments, torch, the template of the node's processes, then the connection and the loop."""

import argparse
import gc
import importlib
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection as PipeEnd
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import TYPE_CHECKING

from checkpoint import descriptors
from resilient import clock
from resilient.access import restrict_as
from resilient.agent import NAME, template_process
from resilient.agent.predecessor import end_predecessors
from resilient.exits import EnvironmentUnusable, Exit
from resilient.lifeline import die_with_parent, leave_stops_to_the_driver, name_process
from resilient.logs.paths import agent_log
from resilient.placement.applied import gpus_of, leave_to_ranks, of_this_node
from resilient.placement.binding import Binding, Share
from resilient.placement.topology import read
from resilient.protocol.connection import TOKEN_VARIABLE, Connection, parse_addresses
from resilient.protocol.messages import AgentFailed
from resilient.slurm.headless import CLOSED_S, see_to_the_job
from resilient.slurm.roster import VARIABLE as ROSTER_VARIABLE
from resilient.slurm.roster import seat_of

if TYPE_CHECKING:
    from resilient.agent.settings import AgentSettings

CONNECT_S = 30.0
TOPOLOGY = "SLURM_TOPOLOGY_ADDR"  # the switches above this node
# c10d asks for the name of every address that it connects to, for its log; where nobody answers, that takes longer with the
# resolver's own 5 s than it has for the connection. For workers, too.
RESOLVER = "timeout:1 attempts:2"


def main() -> int:
    """Run an agent until the driver ends the run, is gone, or has been silent for too long."""
    leave_stops_to_the_driver()  # until the agent can tell it of them
    name_process(NAME)
    descriptors.raise_limit()  # others connect to the store, which closes nothing by itself
    gc.disable()  # until all is imported: there is nothing to collect
    args = _arguments(sys.argv[1:])
    if args.parent is not None:
        die_with_parent(args.parent)
    if args.ahead:
        importlib.import_module("torch")
        args = _orders()
    restrict_as(args.run_dir)
    token = os.environ.pop(TOKEN_VARIABLE, "")  # for this process alone, not for what it starts
    earlier: list[int] = []
    in_step = args.node is None
    if in_step:
        try:
            seat = seat_of(os.environ, socket.gethostname())
        except EnvironmentUnusable as error:
            sys.stderr.write(f"{error}\n")
            return error.code
        args.node, token = seat.node, f"{token}.{seat.incarnation}"
        os.environ.pop(ROSTER_VARIABLE)
        with suppress(OSError):  # then it is Slurm's to keep
            _write_to(agent_log(args.run_dir, args.node))
        earlier = end_predecessors(args.run_dir)
    logging.basicConfig(level=args.log_level.upper(), format=template_process.LOG_FORMAT)
    logging.getLogger("torch").setLevel(logging.WARNING)
    for pid in earlier:
        logging.getLogger(__name__).warning("process %d, the agent before this one, was still there", pid)
    os.environ.setdefault("RES_OPTIONS", RESOLVER)
    os.environ.update(clock.environment())  # on a machine of its own, an agent and its workers go by one clock
    # All ranks of the group are alike, which spares torchelastic a round through the store.
    os.environ["TORCH_ELASTIC_WORKER_IDENTICAL"] = "1"
    importlib.import_module("torch")
    gc.freeze()
    outcome, its = Pipe() if args.prepare_node == args.node else (None, None)
    control = _fork_template(args, its)
    from resilient import storage
    from resilient.agent.agent import NodeAgent  # after the fork, beside the template's imports: it makes threads and connections
    from resilient.agent.environment import token_of
    from resilient.agent.logs import NodeOutput
    from resilient.agent.rendezvous import log_errors_alone

    log_errors_alone()  # here, and not in the ranks, which come of the template
    gc.enable()
    secret, incarnation = token_of(token)
    patience_s = max(CONNECT_S, args.fence_s)  # a driver that was stopped answers when it goes on
    with (
        NodeOutput(args.run_dir) as output,
        Connection(
            parse_addresses(args.driver), token=secret, node=args.node, incarnation=incarnation, timeout_s=patience_s
        ) as connection,
    ):
        try:
            kept = storage.read(args.run_dir)
        except (OSError, ValueError) as error:
            why = _unreadable(args.run_dir, error)
            sys.stderr.write(f"{why}\n")
            connection.send(AgentFailed(generation=0, error=why))
            return Exit.UNUSABLE
        settings = _settings(args, token, args.addr or connection.own_address())
        leave_to_ranks(settings.binding)  # for the snapshot daemon as well, and not for the template: ranks come of it
        with output.logging_to(agent_log(args.run_dir, args.node)):  # not before: it makes directories that are not there
            agent = NodeAgent(settings, connection, control, output, kept, outcome)
            if args.parent is not None:
                # Not SIGKILL from here on: an agent that has lost its driver ends its workers and keeps what they have reported.
                die_with_parent(args.parent, signal.SIGTERM)
            agent.run()
    if agent.fenced:
        see_to_the_job(os.environ)
    elif in_step and agent.driver_gone:
        see_to_the_job(os.environ, CLOSED_S)
    return 0


def _unreadable(run_dir: Path, error: OSError | ValueError) -> str:
    """Why an agent cannot be of any use on this host."""
    if not run_dir.is_dir():
        return f"{run_dir} is not there on {socket.gethostname()}: is it mounted?"
    if isinstance(error, OSError):
        return f"{run_dir} cannot be read on {socket.gethostname()}: {error.filename}: {error.strerror}"
    return str(error)


def _fork_template(args: argparse.Namespace, outcome: PipeEnd | None) -> socket.socket:
    """Fork the process that imports the entry point; the agent's socket to it. Nothing is open yet that it should not have.

    Args:
        outcome: to which the preparation writes, where it is to be forked there; closed here.
    """
    control, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    agent = os.getpid()
    if os.fork() == 0:
        control.close()
        template_process.become(agent, its, outcome, args.entrypoint, args.run_dir)
    its.close()
    if outcome is not None:
        outcome.close()
    return control


def _arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m resilient.agent", description=__doc__)
    needed = "--ahead" not in words
    parser.add_argument("--ahead", action="store_true", help="import torch, then read the other arguments from the standard input")
    parser.add_argument("--driver", required=needed, metavar="HOST:PORT[,…]", help="addresses of the driver, best first")
    parser.add_argument("--node", type=int, help=f"index of this node; else {ROSTER_VARIABLE} tells it by the name of the host")
    parser.add_argument("--procs", type=int, required=needed, help="workers on this node")
    parser.add_argument("--run-dir", type=Path, required=needed)
    parser.add_argument("--run-id", required=needed)
    parser.add_argument("--entrypoint", required=needed, metavar="ENTRYPOINT")
    parser.add_argument("--fence-s", type=float, required=needed)
    parser.add_argument("--health-s", type=float, default=0.0, help="what the check of this node may take; 0: none is made")
    parser.add_argument("--world", type=int, default=1, help="ranks of all nodes")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="what ranks compute on")
    parser.add_argument("--binding", choices=["auto", "none", "numa"], default="none", help="see cluster.binding")
    parser.add_argument("--sharing", type=int, default=1, help="agents of this run on this machine")
    parser.add_argument("--prepare-node", type=int, help="whose agent calls the entry point's prepare(config, progress), once")
    parser.add_argument("--addr", help="address at which the other nodes reach this one; else the one that leads to the driver")
    parser.add_argument("--parent", type=int, help="end when this parent process does")
    parser.add_argument("--log-level", default="INFO")
    return parser.parse_args(words)


def _orders() -> argparse.Namespace:
    """What an agent that was started ahead is to be (`driver.launch.AgentAhead`); the process ends if it is not needed."""
    text = sys.stdin.buffer.read()
    if not text:
        os._exit(0)
    orders = json.loads(text)
    os.environ.update(orders["environ"])
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    args = _arguments(orders["arguments"])
    restrict_as(args.run_dir)  # the log, too
    _write_to(Path(orders["log"]))
    return args


def _write_to(path: Path) -> None:
    """Append what this process and its children print to a file."""
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
    for each in (1, 2):
        os.dup2(fd, each)
    os.close(fd)


def _settings(args: argparse.Namespace, token: str, addr: str) -> "AgentSettings":
    from resilient.agent.settings import AgentSettings

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
        driver=args.driver,
        token=token,
        addr=addr,
        binding=_binding(args),
        place=os.environ.get(TOPOLOGY, ""),
        gpus=_gpus(args),
    )


def _gpus(args: argparse.Namespace) -> tuple[str, ...]:
    found = gpus_of(read(), args.procs) if args.device == "cuda" else []
    return tuple(gpu.address if gpu is not None else "" for gpu in found)


def _binding(args: argparse.Namespace) -> Binding:
    first = args.node * args.procs if args.sharing > 1 else 0
    return of_this_node(args.binding, args.device, Share(first, args.procs, args.sharing * args.procs))
