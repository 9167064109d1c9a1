"""Entry point of the snapshot daemon: settings on the first line of the standard input, requests on the others."""

import asyncio
import logging
import os
import signal
from contextlib import suppress

from checkpoint import descriptors
from checkpoint.daemon.daemon import LAST_WORDS_S, Daemon
from checkpoint.daemon.log_handler import NonBlockingHandler
from checkpoint.daemon.outlet import Outlet
from checkpoint.framing import Decoder, NotAMessage
from checkpoint.protocol import DaemonSettings
from checkpoint.safe_dir import UnsafeDirectory

STDIN, STDOUT, STDERR = 0, 1, 2

log = logging.getLogger("checkpoint.daemon")


def main() -> None:
    """Work until the standard input ends."""
    for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):  # a scheduler sends them to every process of a job
        signal.signal(sig, signal.SIG_IGN)
    handlers = [NonBlockingHandler(STDERR)]
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(name)s: %(message)s", handlers=handlers)
    descriptors.raise_limit()
    settings = _settings()
    if settings is None:
        return
    with suppress(OSError):
        os.nice(settings.nice)
    asyncio.run(_run(settings))


async def _run(settings: DaemonSettings) -> None:
    outlet = Outlet(STDOUT)
    try:
        await Daemon(settings, outlet).run(STDIN)
    except UnsafeDirectory as error:
        log.error("%s", error.strerror)
    outlet.close(LAST_WORDS_S)
    os._exit(0)  # neither a job that hangs in the kernel nor a reader far away may hold up the end


def _settings() -> DaemonSettings | None:
    """The first message; None where there is none."""
    decoder: Decoder[DaemonSettings] = Decoder(DaemonSettings)
    with open(STDIN, "rb", buffering=0, closefd=False) as unbuffered:  # what follows the line is the loop's
        while line := unbuffered.readline():
            try:
                return decoder.decode(line)
            except NotAMessage as error:
                log.warning("refused: %s", error)
    return None


if __name__ == "__main__":
    main()
