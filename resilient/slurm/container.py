"""The command line of Apptainer, and of Singularity, which takes the same words. Pure but for `runtime_of`.

What must be there inside is bound: the run directory, the tiers, where the command is run, and RAM, in which agents and ranks meet.
"""

import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from resilient.config import Config
from resilient.config.sections.machines import Container
from resilient.exits import EnvironmentUnusable

RUNTIMES = ("apptainer", "singularity")
RUNTIME_VARIABLE = "RESILIENT_CONTAINER_RUNTIME"  # from the batch script to a driver that runs inside
RAM = "/dev/shm"

# PMIx inside cannot ask the munge outside who it is, where the site's Slurm would have it so.
PMIX = ("PMIX_SECURITY_MODE", "native")

# What a runtime says of itself to what runs inside; to another one it would be orders.
_SAID = ("APPNAME", "BIND", "COMMAND", "CONTAINER", "ENVIRONMENT", "NAME")


def runtime_of(container: Container, environ: Mapping[str, str]) -> str:
    """The program to start containers with.

    Raises:
        EnvironmentUnusable: there is none, or no image.
    """
    within = next((name for name in RUNTIMES if f"{name.upper()}_CONTAINER" in environ), None)
    if within is None and not container.image.exists():
        raise EnvironmentUnusable(f"slurm.container.image: there is no {container.image}")
    names = _candidates(container)
    found = environ.get(RUNTIME_VARIABLE) or next(filter(None, map(shutil.which, names)), None) or within
    if found is None:
        raise EnvironmentUnusable(_missing(names))
    return found


def on_node(
    config: Config, container: Container, command: Sequence[str], *, directory: Path, runtime: str, gpus: bool
) -> list[str]:
    """A command on a node, in the container; its tiers are made first, for what is not there cannot be bound.

    Args:
        command: whose first word is the interpreter outside.
        directory: in which it runs.
        gpus: whether nodes have any.
    """
    nv = ["--nv"] if container.nv is True or (container.nv == "auto" and gpus) else []
    words = [runtime, "exec", *nv, *_options(config, container, config.run_dir, directory), container.python, *command[1:]]
    return ["sh", "-c", f"{_made(config)}; exec {shlex.join(words)}"]


def batch_lines(config: Config, container: Container, command: Sequence[str], run_dir: Path, directory: Path) -> list[str]:
    """The last lines of a batch script, in the shell: the command in the container, in the shell's place.

    Args:
        run_dir, directory: as for the script.
    """
    names = _candidates(container)
    looked_for = " || ".join(f"command -v {name}" for name in names)
    nv = {True: "nv=--nv", False: "nv=", "auto": "nv=; [ -e /dev/nvidiactl ] && nv=--nv"}[container.nv]
    options = shlex.join(_options(config, container, run_dir, directory))
    why = shlex.quote(f"resilient: {_missing(names)}")
    return [
        f"runtime=$({looked_for}) || {{ echo {why} >&2; exit {EnvironmentUnusable.code}; }}",
        f'export {RUNTIME_VARIABLE}="$runtime"',
        nv,
        _made(config),
        "# In the shell's place, so that signals reach it and its exit code is the job's.",
        f'exec "$runtime" exec $nv {options} {shlex.join(command)}',
    ]


def outside(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without what a container around this process has put there, if there is one."""
    if not any(f"{name.upper()}_CONTAINER" in environ for name in RUNTIMES):
        return dict(environ)
    said = {f"{name.upper()}_{what}" for name in RUNTIMES for what in _SAID}
    return {name: value for name, value in environ.items() if name not in said}


def _candidates(container: Container) -> tuple[str, ...]:
    return RUNTIMES if container.runtime == "auto" else (container.runtime,)


def _missing(names: Sequence[str]) -> str:
    return f"there is no {' and no '.join(names)} on the PATH; name its module in slurm.modules"


def _options(config: Config, container: Container, run_dir: Path, directory: Path) -> list[str]:
    wanted = {Path(RAM): None, run_dir: None, directory: None, **dict.fromkeys(tier.path for tier in config.checkpoint.tiers)}
    wanted.pop(Path("/"), None)
    # What is below another one comes with it.
    places = [str(path) for path in wanted if wanted.keys().isdisjoint(path.parents)]
    binds = [word for each in (*places, *container.binds) for word in ("--bind", each)]
    mode = f"{PMIX[0]}={config.slurm.environment.get(*PMIX)}"
    return [*binds, "--pwd", str(directory), "--env", mode, str(container.image)]


def _made(config: Config) -> str:
    return shlex.join(["mkdir", "-p", *(str(tier.path) for tier in config.checkpoint.tiers)])
