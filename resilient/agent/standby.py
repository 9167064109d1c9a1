"""Standbys: ranks of the next generation, forked before anybody knows that there will be one.

Owns the processes until they are given a rank. A standby belongs to no generation: it has the modules, the config and what the
entry point's module has warmed up, and no address, store or memory of any attempt. It starts to run when it is sent a rank's
`WorkerSpec`, and nothing else wakes it. It may become the very rank of as many that it was warmed up as, on the same device, and no
other: libraries remember which shard of a tensor is theirs, and CUDA which devices it has found.
"""

import contextlib
import logging
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from resilient import entry, visible_gpus, worker
from resilient.agent import inspection
from resilient.agent.bootstrap import WorkerSpec, run_rank, shield, start_rank
from resilient.agent.forkserver import Forked, ForkServer
from resilient.agent.limits import KILL_S
from resilient.config import ConfigError
from resilient.lifeline import name_process

log = logging.getLogger(__name__)

LOCAL_RANK = "LOCAL_RANK"


@dataclass(frozen=True)
class Role:
    """What a process is warmed up as.

    Attributes:
        local_rank: which of the GPUs that it sees is its own.
        gpus: that it sees, as CUDA_VISIBLE_DEVICES names them, where devices of the node are left out; None: those of the agent.
    """

    rank: int
    world_size: int
    local_rank: int
    gpus: str | None = None

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> "Role":
        """That of the rank with this environment."""
        rank, world_size, local_rank = (int(environ[name]) for name in ("RANK", "WORLD_SIZE", LOCAL_RANK))
        return cls(rank, world_size, local_rank, environ.get(visible_gpus.VARIABLE))

    @property
    def variables(self) -> dict[str, str]:
        """By which the process finds its GPU."""
        gpus = {} if self.gpus is None else {visible_gpus.VARIABLE: self.gpus}
        return {LOCAL_RANK: str(self.local_rank), **gpus}


def stand_by(orders: Connection, config_path: Path, entrypoint: str, role: Role) -> None:
    """In the forked process: do all that can be done ahead, say so, and wait to be a rank."""
    shield()
    os.environ.update(role.variables)
    found = entry.parse(entrypoint)
    config = None
    if not found.is_script:
        with contextlib.suppress(ConfigError, OSError):  # then the rank reads it itself, and says what is wrong
            config = worker.load_config(config_path)
            entry.warm_up(found, config, role.rank, role.world_size)
    try:
        orders.send(None)
        spec: WorkerSpec = orders.recv()
    except (OSError, EOFError):  # not wanted any more
        os._exit(0)
    orders.close()
    name_process(f"rank{role.rank}")
    run_rank(spec, config)


@dataclass(frozen=True)
class _Standby:
    role: Role
    process: Forked
    orders: Connection

    @property
    def ready(self) -> bool:
        """Whether it has done its work, and runs: a process that somebody has stopped would not wake."""
        return self.orders.poll() and inspection.state_of(self.process.pid or 0) in ("R", "S")

    def dismiss(self, left_behind: Callable[[int], None]) -> None:
        """End it, and wait until it has gone; one that does not go is left behind, and told of by its process id."""
        self.orders.close()
        self.process.kill()
        self.process.join(KILL_S)
        try:
            self.process.close()
        except ValueError:
            log.error("standby %d (process %s) does not die; leaving it behind", self.role.rank, self.process.pid)
            left_behind(self.process.pid or 0)


class Standbys:
    """The standbys of one node, at most one for each rank that it has.

    Args:
        config: the resolved config's file; what the standbys have read of it must stay true.
        entrypoint: see `resilient.entry`.
        server: forks them.
        left_behind: takes the process ids of those that do not die, and may hold memory of a GPU.
    """

    def __init__(self, config: Path, entrypoint: str, server: ForkServer, *, left_behind: Callable[[int], None]) -> None:
        self._left_behind = left_behind
        self._config, self._entrypoint = config, entrypoint
        self._server = server
        self._waiting: dict[int, _Standby] = {}  # by rank

    def missing(self, roles: Collection[Role]) -> Role | None:
        """One of these that has no standby; None where all have one. Those that nobody needs any more are ended."""
        for rank, standby in list(self._waiting.items()):
            if standby.role not in roles:
                self._waiting.pop(rank).dismiss(self._left_behind)
        return next((role for role in roles if role.rank not in self._waiting), None)

    def fork(self, role: Role) -> None:
        """One for this rank; returns when it is forked, which takes some 10 ms.

        Raises:
            ForkServerGone: nothing can be forked any more.
            OSError: there is no room for a process or for descriptors now.
        """
        ours, its = self._server.Pipe()
        args = (its, self._config, self._entrypoint, role)
        process = self._server.Process(target=stand_by, args=args, name=f"standby{role.rank}")
        try:
            process.start()
        except BaseException:
            ours.close()
            raise
        finally:
            its.close()
        self._waiting[role.rank] = _Standby(role, process, ours)

    def start(self, spec: WorkerSpec) -> Forked:
        """A process that runs this rank: its standby, or where that is not ready one that is forked now."""
        role = Role.of(spec.environ)
        standby = self._waiting.pop(role.rank, None)
        if standby is not None:
            if standby.role == role and standby.ready:
                try:
                    standby.orders.recv()
                    standby.orders.send(spec)
                except (OSError, EOFError):
                    pass
                else:
                    standby.orders.close()
                    return standby.process
            standby.dismiss(self._left_behind)
        process = self._server.Process(target=start_rank, args=(spec,), name=f"rank{role.rank}")
        process.start()
        return process

    def close(self) -> None:
        """End those that nobody needs any more."""
        while self._waiting:
            self._waiting.popitem()[1].dismiss(self._left_behind)
