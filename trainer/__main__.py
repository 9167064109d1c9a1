"""`python -m trainer CONFIG [KEY=VALUE]...`: train without a supervisor, alone or under torchrun."""

import logging
import os
import sys
from pathlib import Path

from resilient.worker import ConfigError, init, load_config, record_config, settle
from trainer.main import prepare, train

log = logging.getLogger("trainer")


def main() -> int:
    if len(sys.argv) < 2:
        sys.stderr.write("usage: python -m trainer CONFIG [KEY=VALUE]...\n")
        return 2
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        config = load_config(Path(sys.argv[1]), sys.argv[2:])
        context = init()
        settle(config, context.world_size)
        if context.rank == 0:
            record_config(config)
        # Every rank of a node asks; the first one prepares, the others find it done.
        prepare(config, lambda what, done, total: log.debug("%s: %d of %d", what, done, total))
        train(config)
    except ConfigError as error:
        # From every rank: torchrun ends the others as soon as one is gone, and which one that is nobody knows.
        sys.stderr.write(f"{error}\n")
        return 78
    # No interpreter shutdown: torch's communication threads, taken down by it, now and then abort a run that has succeeded.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
