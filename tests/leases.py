"""Leases of run directories whose drivers are processes that know nothing of them."""

import json
from dataclasses import asdict
from pathlib import Path

from resilient import pid_namespace
from resilient.driver.lease import LEASE, Owner, machine_id


def write_lease(run_dir: Path, pid: int, namespace: int | None = None) -> None:
    """As if the driver were the process of this number, on this machine. Args: namespace: that of the number; None: the test's."""
    owner = Owner("n1", pid, "", machine_id(), "t", pid_namespace.own() if namespace is None else namespace)
    (run_dir / LEASE).write_text(json.dumps(asdict(owner)))
