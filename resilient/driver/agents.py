"""How agents are started for this job: the launcher, and the command line that every agent gets."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import psutil

from resilient import clock
from resilient.campaign import communication, gpu_count, shares_of_gpus
from resilient.config import Config, ConfigError, Layout, Problem
from resilient.config.timeouts import nccl_heartbeat_s, timeouts
from resilient.driver.launch import AgentAhead, AgentCommand, Launcher, LocalLauncher
from resilient.exits import EnvironmentUnusable
from resilient.script.progress import DRAIN_VARIABLE, ON_STOP_VARIABLE
from resilient.slurm import container
from resilient.slurm.allocation import Allocation
from resilient.slurm.launch import SlurmLauncher, addresses, own_addresses
from resilient.worker import CHAOS_VARIABLE, DEVICE_VARIABLE

HEARTBEAT_VARIABLE = "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"
INJECTION = "chaos.injectors.inside"  # by name: the runtime knows nothing of it

Ended = Callable[[int, int, str], None]


def listening_addresses(config: Config, allocation: Allocation | None) -> list[str]:
    """Of this machine, those at which the driver listens for agents: its own on the networks of the job, or the loopback's.

    Raises:
        ConfigError: there is no interface of the name that the config has.
        EnvironmentUnusable: there is no address at which other machines could reach this one.
    """
    if allocation is None:
        return [LocalLauncher.addr]
    # A name with a suffix may lead to an interface that is not named.
    interface = None if config.slurm.hostname_suffix else config.slurm.interface
    if found := own_addresses(interface):
        return found
    host, there = socket.gethostname(), sorted(psutil.net_if_addrs())
    if interface is not None and interface not in there:
        raise ConfigError([Problem("slurm.interface", interface, f"{host} has no such interface; allowed: {', '.join(there)}")])
    where = f"of {', '.join(there)}" if interface is None else f"of {interface} (slurm.interface)"
    raise EnvironmentUnusable(f"agents on other nodes cannot reach {host}: none {where} has an address that leads away")


def launcher_of(
    config: Config,
    layout: Layout,
    allocation: Allocation | None,
    *,
    secret: str,
    port: int,
    ended: Ended,
    ahead: AgentAhead | None,
    nonce: str,
) -> Launcher:
    """The launcher of a job.

    Args:
        port: at which the driver listens.
        ended: called with node, incarnation and a description when an agent has ended.
        ahead: the first agent's process, if it was started before all that was known.
        nonce: of the campaign, as of `storage.nonce_of`.
    """
    slurm = config.slurm
    if allocation is None:
        command = agent_command(config, layout, None, secret, f"{LocalLauncher.addr}:{port}")
        return LocalLauncher(command, ended, ahead, shares_of_gpus(config, layout), nonce)
    here = allocation.hosts[0] if allocation.holds(os.environ, socket.gethostname()) else None
    reached = addresses(here, port, suffix=slurm.hostname_suffix, interface=slurm.interface)
    return SlurmLauncher(
        agent_command(config, layout, allocation, secret, ",".join(reached)),
        ended,
        allocation=allocation,
        cpu_bind="none" if slurm.cpu_bind == "auto" else slurm.cpu_bind,
        gpus_per_task=slurm.gpus_per_task,
        extra=slurm.srun_args,
        inside=_inside(config),
    )


def _inside(config: Config) -> Callable[[list[str]], list[str]]:
    """Turns the command line of an agent into one that runs it in the container, where there is one."""
    box = config.slurm.container
    if box is None:
        return list
    runtime = container.runtime_of(box, os.environ)
    gpus = gpu_count() > 0 and config.cluster.device != "cpu"
    directory = Path.cwd()  # it may be deleted while the job goes on
    return lambda command: container.on_node(config, box, command, directory=directory, runtime=runtime, gpus=gpus)


def agent_command(config: Config, layout: Layout, allocation: Allocation | None, secret: str, address: str) -> AgentCommand:
    """What every agent is started with. Args: address: of the driver, host:port, several with commas between."""
    limits = timeouts(config)
    device = "cuda" if gpu_count() > 0 and config.cluster.device != "cpu" else "cpu"
    environ = {
        "OMP_NUM_THREADS": (os.environ.get("OMP_NUM_THREADS") if config.is_script else None) or str(layout.threads_per_proc),
        DEVICE_VARIABLE: device,
        ON_STOP_VARIABLE: config.resilience.on_stop,
        DRAIN_VARIABLE: str(limits.drain_s),
        **clock.environment(),
        **({} if HEARTBEAT_VARIABLE in os.environ else {HEARTBEAT_VARIABLE: str(nccl_heartbeat_s(config))}),
        **communication(config, allocation),
        CHAOS_VARIABLE: INJECTION if config.chaos.allow else "",  # said in any case: it is not to be had from elsewhere
    }
    return AgentCommand(
        driver=address,
        procs=layout.procs_per_node,
        run_dir=config.run_dir,
        run_id=config.name,
        entrypoint=config.entrypoint,
        fence_s=limits.fence_s,
        health_s=limits.health_on_gpus_s if device == "cuda" else limits.health_s,
        world=layout.world_size,
        device=device,
        token=secret,
        environ=environ,
        log_level=config.logging.level,
        binding=config.cluster.binding,
        sharing=config.cluster.slots if allocation is None else 1,
    )
