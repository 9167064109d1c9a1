"""The process that becomes the template: forked from the agent, or begun anew where an import of the script's has started CUDA.

CUDA that a process has started cannot be used by those that are forked from it. So the template leaves such an import to the ranks,
and begins anew as another program in the same process, for which the agent has the same socket.
"""

import gc
import importlib
import json
import logging
import os
import socket
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection as PipeEnd
from pathlib import Path
from typing import NoReturn

from resilient import entry
from resilient.agent import preload, preparation
from resilient.agent.program import leave_logging_to_the_script
from resilient.imports import shadowing
from resilient.lifeline import die_with_parent

NAME = "resilient.agent.template_process"
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


@dataclass(frozen=True)
class Orders:
    """What the program that begins anew is told.

    Attributes:
        agent: its process id.
        control: a descriptor, as `outcome`; see `become`.
        modules: to import; see `entry.ahead`.
    """

    agent: int
    control: int
    outcome: int | None
    entrypoint: str
    run_dir: str
    modules: Sequence[str]
    log_level: int


def become(agent: int, control: socket.socket, outcome: PipeEnd | None, entrypoint: str, run_dir: Path) -> NoReturn:
    """The template, in a process forked from the agent; it ends with it.

    Args:
        control: to the agent.
        outcome: to which the preparation writes, where it is to be forked there.
    """
    level = logging.getLogger().getEffectiveLevel()
    try:
        program = entry.parse(entrypoint)
        entry.find_modules(program)
        descriptors = control.fileno(), None if outcome is None else outcome.fileno()
        orders = Orders(agent, *descriptors, entrypoint, str(run_dir), entry.ahead(program), level)
        _serve(orders, control, outcome)
    except ConnectionError:
        pass  # the agent has ended
    except BaseException:  # noqa: BLE001 - nothing may go on here as if it were the agent
        traceback.print_exc()
    finally:
        os._exit(1)


def _serve(orders: Orders, control: socket.socket, outcome: PipeEnd | None) -> NoReturn:
    def fork_preparation() -> int:
        assert outcome is not None
        template = os.getpid()
        pid = os.fork()
        if pid == 0:
            die_with_parent(template)
            control.close()
            run_dir = Path(orders.run_dir)
            preparation.run(outcome, run_dir / "config.yaml", orders.entrypoint, preparation.log_of(run_dir))
        outcome.close()
        return pid

    def begin_anew(modules: Sequence[str]) -> NoReturn:
        for descriptor in (orders.control, orders.outcome):
            if descriptor is not None:
                os.set_inheritable(descriptor, True)
        words = [*shadowing.running(NAME), json.dumps({**asdict(orders), "modules": list(modules)})]
        os.execv(words[0], words)

    if entry.parse(orders.entrypoint).is_script:
        leave_logging_to_the_script()
    preload.serve(orders.agent, control, orders.modules, None if outcome is None else fork_preparation, begin_anew)


def main() -> NoReturn:
    """In the program that begins anew."""
    gc.disable()  # until all is imported
    orders = Orders(**json.loads(sys.argv[1]))
    try:
        die_with_parent(orders.agent)
        logging.basicConfig(level=orders.log_level, format=LOG_FORMAT)
        logging.getLogger("torch").setLevel(logging.WARNING)
        importlib.import_module("torch")
        gc.freeze()
        entry.find_modules(entry.parse(orders.entrypoint))
        for descriptor in (orders.control, orders.outcome):
            if descriptor is not None:
                os.set_inheritable(descriptor, False)
        _serve(
            orders,
            socket.socket(fileno=orders.control),
            None if orders.outcome is None else PipeEnd(orders.outcome, readable=False),
        )
    except ConnectionError:
        pass  # the agent has ended
    except BaseException:  # noqa: BLE001 - as in `become`
        traceback.print_exc()
    finally:
        os._exit(1)


if __name__ == "__main__":
    main()
