"""Descriptors: how many files and connections this process may have open."""

import resource

_soft_at_start = resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def raise_limit() -> None:
    """Raise the soft limit of this process, and of those that it starts, to the hard one."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def current() -> int:
    """The soft limit of this process."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def at_start() -> int:
    """The soft limit that this process was started with."""
    return _soft_at_start


def limit(soft: int) -> None:
    """Set the soft limit of this process."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
