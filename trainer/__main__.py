"""`python -m trainer CONFIG [KEY=VALUE]...`: train without a supervisor, alone or under torchrun."""

import logging
import os
import sys
from pathlib import Path

from checkpoint import CheckpointError
from resilient.worker import (
    BadNumbersError,
    ConfigError,
    EnvironmentUnusable,
    UnrecoverableError,
    init,
    load_config,
    record_config,
    settle,
)
from trainer.data.errors import DataError
from trainer.main import prepare, train

log = logging.getLogger("trainer")

UNUSABLE, GAVE_UP, STOPPED, CONFIG = 69, 70, 75, 78  # exit codes, as `resilient run` has them


def main() -> int:
    if len(sys.argv) < 2:
        sys.stderr.write("usage: python -m trainer CONFIG [KEY=VALUE]...\n")
        return 2
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        status = 0 if _train(Path(sys.argv[1]), sys.argv[2:]) else STOPPED
    except ConfigError as error:
        # From every rank: torchrun ends the others as soon as one is gone, and which one that is nobody knows.
        sys.stderr.write(f"{error}\n")
        status = CONFIG
    except (UnrecoverableError, BadNumbersError) as error:
        sys.stderr.write(f"{error}\n")
        status = GAVE_UP
    except (EnvironmentUnusable, CheckpointError, DataError) as error:  # of the data: what was there when the job began
        sys.stderr.write(f"{error}\n")
        status = UNUSABLE
    except OSError as error:
        if error.errno is None:
            raise
        sys.stderr.write(f"{error.filename or 'the system'}: {error.strerror}\n")
        status = UNUSABLE
    # No interpreter shutdown: torch's communication threads, taken down by it, now and then abort a run that has succeeded.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _train(path: Path, overrides: list[str]) -> bool:
    """Whether the last step is reached."""
    config = load_config(path, overrides)
    context = init()
    settle(config, context.world_size)
    if context.rank == 0:
        try:
            record_config(config)
        except OSError as error:
            raise EnvironmentUnusable(f"{error.filename or config.run_dir}: {error.strerror or error}") from error
    # Every rank of a node asks; the first one prepares, the others find it done.
    prepare(config, lambda what, done, total: log.debug("%s: %d of %d", what, done, total))
    return train(config)


if __name__ == "__main__":
    sys.exit(main())
