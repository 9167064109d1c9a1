"""How long the process groups of a worker wait: what the runtime asks for, in place of torch's 10 minutes (NCCL) or 30 (gloo).

A script that passes no timeout, and every group that is made behind its back (those of a device mesh among them), follow. Where it
passes one of its own, that holds.
"""

from datetime import timedelta


def wait_at_most(seconds: float) -> None:
    """The default timeout of process groups of this process, from now on."""
    from torch.distributed import distributed_c10d

    distributed_c10d.default_pg_timeout = timedelta(seconds=seconds)
    distributed_c10d.default_pg_nccl_timeout = timedelta(seconds=seconds)  # type: ignore[attr-defined]
