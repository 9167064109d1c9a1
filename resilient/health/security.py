"""`resilient doctor --security`: who may read, write or reach what a campaign has on this machine.

Owns the checks of modes, owners and listening sockets. Changes nothing; sees what this user may see.
"""

import contextlib
import ipaddress
import os
import socket
import stat
import time
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any

import psutil
import yaml

from checkpoint import safe_dir
from checkpoint.ownership import user_name, why_not_obeyed
from checkpoint.safe_dir import UnsafeDirectory
from checkpoint.tools import locations
from checkpoint.tools.refusal import Refusal
from resilient import storage
from resilient.access import CONTROL, MODES, Mode
from resilient.agent import memory
from resilient.driver.lease import holder
from resilient.health.report import Finding, Report
from resilient.processes import driver_pid, local_agents, must_be_run_directory, other_owner
from resilient.slurm.launch import own_addresses

_UNSEEN = "what the campaign has here cannot be seen: run this as its user,"
SRUN = "srun"  # of a job, which talks with slurmd; where it listens is SrunPortRange of slurm.conf


def inspect(run_dir: Path) -> Report:
    """Look at a run directory, and at what its campaign has on this machine. Raises EnvironmentUnusable where it is none."""
    began = time.monotonic()
    must_be_run_directory(run_dir)
    run_dir = run_dir.absolute()
    found = [*_config(run_dir), *_run_directory(run_dir), *_tiers(run_dir), *_memory(run_dir), *_listeners(run_dir)]
    return Report(tuple(found), time.monotonic() - began)


def _configured(run_dir: Path, *keys: str) -> Any:
    """What the run's config says under these keys; None where it says nothing, or cannot be read."""
    try:
        found = yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))
        for key in keys:
            found = found[key]
        return found
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError, RecursionError):
        return None


def _config(run_dir: Path) -> Iterator[Finding]:
    """Whether the config says what is right here; where it cannot, what follows is judged as if it said nothing."""
    path = run_dir / "config.yaml"
    why = "it is no mapping"
    try:
        if isinstance(yaml.safe_load(path.read_text(encoding="utf-8")), dict):
            return
    except FileNotFoundError:
        return
    except OSError as error:
        why = str(error.strerror)
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        why = f"no valid YAML ({str(error).splitlines()[0]})"
    yield Finding("config", "fail", f"{path} cannot be read: {why}; take it from a copy, or let the next job write it")


def _mode_of(run_dir: Path) -> Mode:
    return "group" if _configured(run_dir, "run_dir_mode") == "group" else "private"


def _run_directory(run_dir: Path) -> Iterator[Finding]:
    wanted = _mode_of(run_dir)
    found = run_dir.stat()
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid != os.geteuid():
        text = f"{run_dir} belongs to {user_name(found.st_uid)}; ask its owner to look, or copy what you need"
        yield Finding("run directory", "fail", text)
    elif mode & 0o777 & ~MODES[wanted]:
        text = f"{run_dir} has mode {mode:04o}, where run_dir_mode {wanted} allows {MODES[wanted]:04o}: chmod {MODES[wanted]:o} it"
        yield Finding("run directory", "fail", text)
    else:
        yield Finding("run directory", "ok", f"{run_dir} is yours, with mode {mode:04o}")
    bad = 0
    for name in CONTROL:
        why = why_not_obeyed(run_dir / name, group=wanted == "group")
        if why is not None:
            bad += 1
            yield Finding(f"control file {name}", "fail", f"{why}; see who has changed it before you run again")
    if not bad:
        yield Finding("control files", "ok", "nobody else may write to those that are there")


def _tiers(run_dir: Path) -> Iterator[Finding]:
    try:
        storage.read(run_dir)
        tiers = locations.tiers(run_dir)
    except (OSError, ValueError, Refusal) as error:
        yield Finding("tiers", "warn", f"{run_dir / storage.FILE} does not say where they are: {error}")
        return
    for tier in tiers:
        check = f"tier {tier.name}"
        if tier.other is not None:
            text = f"{tier.roots[0]} is that of {tier.other}, which {run_dir} was copied from: look at it there"
            yield Finding(check, "skip", text)
            continue
        hidden = [root for root in tier.roots if _is_hidden(root)]
        there = [root for root in tier.roots if os.path.lexists(root)]
        if hidden:
            yield Finding(check, "skip", f"whether {hidden[0]} is there cannot be seen: run this as its user")
        elif not there:
            yield Finding(check, "skip", "nothing of it is on this machine now")
        for root in there:
            yield _durable(tier.name, root, _mode_of(run_dir)) if tier.durable else _private(check, root)


def _is_hidden(path: Path) -> bool:
    """Whether a directory above it keeps from the caller whether it is there."""
    try:
        path.lstat()
    except PermissionError:
        return True
    except OSError:
        pass
    return False


def _durable(name: str, root: Path, wanted: Mode) -> Finding:
    found = root.stat()
    mode = stat.S_IMODE(found.st_mode)
    why = why_not_obeyed(root, group=wanted == "group")
    if why is not None:
        return Finding(f"tier {name}", "fail", f"{why}; others could put checkpoints there")
    if mode & 0o777 & ~MODES[wanted]:
        return Finding(
            f"tier {name}", "warn", f"{root} has mode {mode:04o}: others may read checkpoints; chmod {MODES[wanted]:o} it"
        )
    return Finding(f"tier {name}", "ok", f"{root} has mode {mode:04o}")


def _private(check: str, path: Path) -> Finding:
    try:
        os.close(safe_dir.open_private(path, make=False, close=False))
    except UnsafeDirectory as error:
        return Finding(check, "fail", str(error.strerror))
    except OSError as error:
        return Finding(check, "warn", f"{path} cannot be looked at: {error.strerror}")
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        return Finding(check, "fail", f"{path} has mode {mode:04o}: others may read it; chmod 700 it")
    return Finding(check, "ok", f"{path} is yours alone")


def _memory(run_dir: Path) -> Iterator[Finding]:
    found = memory.directories(run_dir)
    for path in found:
        yield _private("shared memory", path)
    for path in memory.namesakes(run_dir):
        text = (
            f"{path} belongs to {user_name(path.lstat().st_uid)} and has the name of one of yours; it is not used, have it removed"
        )
        yield Finding("shared memory", "warn", text)
    if not found:
        other = other_owner(run_dir)
        text = "the campaign has no directory there now" if other is None else f"{_UNSEEN} {other}"
        yield Finding("shared memory", "skip", text)


def _listeners(run_dir: Path) -> Iterator[Finding]:
    places = _places(run_dir)
    if not places:
        other = other_owner(run_dir)
        text = "no process of the campaign runs on this machine" if other is None else f"{_UNSEEN} {other}"
        yield Finding("listeners", "skip", text)
        return
    hidden = bad = seen = slurms = 0
    in_job = bool((owner := holder(run_dir)) is not None and owner.job)
    for process, allowed in places:
        try:
            sockets = [each for each in process.net_connections(kind="inet") if each.status == psutil.CONN_LISTEN]
            name = process.name()
        except psutil.NoSuchProcess:
            continue
        except psutil.AccessDenied:
            hidden += 1
            continue
        if in_job and name == SRUN:
            slurms += len(sockets)
            continue
        for each in sockets:
            seen += 1
            why = _why_open(each.laddr.ip, allowed)
            if why is not None:
                bad += 1
                family = "[{}]:{}" if each.family == socket.AF_INET6 else "{}:{}"
                at = family.format(each.laddr.ip, each.laddr.port)
                yield Finding(f"listener {name}", "fail", f"process {process.pid} listens on {at}, {why}")
    if hidden:
        yield Finding("listeners", "warn", f"the sockets of {hidden} processes cannot be seen; run this as their user")
    if slurms:
        yield Finding(
            "listeners of Slurm", "ok", f"srun listens on {slurms} ports of all addresses; Slurm authenticates whoever connects"
        )
    if not bad and hidden < len(places):
        chosen = sorted({each for _, allowed in places for each in allowed})
        where = f"loopback and {', '.join(chosen)}" if chosen else "loopback alone"
        yield Finding("listeners", "ok", f"{len(places) - hidden} processes listen on {seen} ports, of {where}")


def _places(run_dir: Path) -> list[tuple[psutil.Process, Set[str]]]:
    """The campaign's processes on this machine, and at which addresses besides the loopback each may listen.

    Those of a job listen where other nodes reach them: the driver at the addresses of its node, or those of `slurm.interface`;
    an agent, its snapshot daemon and its ranks at the node's address, and ranks on the interfaces that are named for collectives.
    """
    owner = holder(run_dir)
    alone = owner is None or not owner.job
    found: dict[int, tuple[psutil.Process, Set[str]]] = {}
    if owner is not None and (driver := driver_pid(owner)) is not None:
        found |= _family(driver, set() if alone else set(_of_driver(run_dir)))
    for pid, record in local_agents(run_dir).items():
        found |= _family(pid, set() if alone else {record.addr, *_of_collectives(run_dir, pid)} - {""})
    return [found[pid] for pid in sorted(found)]


def _family(pid: int, allowed: Set[str]) -> dict[int, tuple[psutil.Process, Set[str]]]:
    try:
        process = psutil.Process(pid)
        return {each.pid: (each, allowed) for each in (process, *process.children(recursive=True))}
    except psutil.Error:
        return {}


def _of_driver(run_dir: Path) -> list[str]:
    # A name with a suffix may lead to an interface that is not named.
    return own_addresses(None if _configured(run_dir, "slurm", "hostname_suffix") else _configured(run_dir, "slurm", "interface"))


def _of_collectives(run_dir: Path, agent: int) -> Iterator[str]:
    """Addresses of the interfaces that the config, or the environment of the agent, names for NCCL and gloo."""
    named = [_configured(run_dir, section, "interface") for section in ("network", "slurm")]
    with contextlib.suppress(psutil.Error):
        environ = psutil.Process(agent).environ()
        named += [environ.get(variable) for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")]
    for text in filter(None, named):
        if text.startswith("^"):  # all but these
            yield from own_addresses()
        else:
            for name in text.removeprefix("=").split(","):
                yield from own_addresses(name.removeprefix("="))


def _why_open(address: str, allowed: Set[str]) -> str | None:
    """Why others can reach a listener, and what to do; None where only those can for whom it is.

    Args:
        allowed: addresses besides the loopback; none where the campaign is on this machine alone.
    """
    ip = ipaddress.ip_address(address.partition("%")[0])
    if ip.is_loopback or str(ip) in allowed:
        return None
    if ip.is_unspecified:
        return "which is every address of this machine; a script of yours opens it, or this version does: bind it to one address"
    if not allowed:
        return "and the campaign is on this machine alone: bind it to 127.0.0.1"
    return f"which is none of the campaign's addresses here ({', '.join(sorted(allowed))}): bind it to one of them"
