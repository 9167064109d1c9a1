"""Exit codes of the command line, and the exceptions that carry them."""

from enum import IntEnum


class Exit(IntEnum):
    """What the exit status of `resilient` means."""

    OK = 0
    UNUSABLE = 69  # the environment cannot hold a run
    GAVE_UP = 70  # the same failure again and again; do not requeue
    STOPPED = 75  # stopped on request before the target: run again to go on; the message says what is not durable
    CONFIG = 78  # the config is wrong


class Watched(IntEnum):
    """What else the exit status of `resilient watch` may mean."""

    STALLED = 3  # somebody works on the campaign, or should since its job runs, and it makes no progress
    DEAD = 4  # nobody works on it, nobody will, and it is not over


class ForeseenError(Exception):
    """Ends a command with its message and `code`, without a traceback."""

    code: Exit


class EnvironmentUnusable(ForeseenError):
    """The machine, a file system or another process keeps the run from starting."""

    code = Exit.UNUSABLE
