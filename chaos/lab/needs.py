"""What the lab needs of the machine, and how to get it."""

import os
import shutil

from resilient.exits import EnvironmentUnusable

# Program → the Debian package that has it.
_HOSTS = {"ip": "iproute2", "nsenter": "util-linux", "unshare": "util-linux", "setsid": "util-linux", "mount": "mount"}
_SLURM = {"slurmctld": "slurm-wlm", "slurmd": "slurm-wlm", "srun": "slurm-wlm", "sinfo": "slurm-wlm", "munged": "munge"}


def missing(*, slurm: bool) -> list[str]:
    """What keeps a lab from coming up here, each with how to get it; empty if nothing does."""
    wanted = {**_HOSTS, **(_SLURM if slurm else {})}
    absent = [program for program in wanted if shutil.which(program) is None]
    found = [] if os.geteuid() == 0 else ["root, for namespaces, links and mounts"]
    if absent:
        packages = " ".join(dict.fromkeys(wanted[program] for program in absent))
        found.append(f"{', '.join(absent)} (on Debian: apt-get install {packages})")
    return found


def demand(*, slurm: bool) -> None:
    """Raises EnvironmentUnusable: something is missing, which it names."""
    found = missing(slurm=slurm)
    if found:
        raise EnvironmentUnusable(f"the lab needs {'; and '.join(found)}")
