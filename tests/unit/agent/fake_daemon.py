"""Stands for the snapshot daemon: reads requests, answers as its argument says, and writes down what it was told.

python fake_daemon.py HOW LOG      HOW: answers | mute | dies (at its first inventory) | nonsense | deaf |
                                talks (more than a pipe takes, before each answer) | fails (at its start)
"""

import sys
import time
from pathlib import Path

from checkpoint.framing import Decoder, encode
from checkpoint.protocol import BeginSession, Clear, Cleared, DaemonSettings, Inventory, Listening, Sync, Synced, TakeInventory

UNION = DaemonSettings | BeginSession | TakeInventory | Clear | Sync


def main() -> None:
    how, log = sys.argv[1], Path(sys.argv[2])
    if how == "deaf":
        time.sleep(600)
    if how == "fails":
        raise MemoryError("as it was told to")
    for line in sys.stdin.buffer:
        request = Decoder(UNION).decode(line)  # type: ignore[var-annotated]
        with log.open("a") as file:
            file.write(f"{type(request).__name__} {getattr(request, 'renew', '')}\n")
        news = {
            DaemonSettings: Listening(generation=0, address="here:1"),
            TakeInventory: Inventory(generation=request.generation, address="here:1", shards=()),
            Clear: Cleared(generation=request.generation),
            Sync: Synced(generation=request.generation),
        }.get(type(request))
        if how == "talks":
            sys.stderr.write("x" * 1_000_000 + "\n")
        if isinstance(request, TakeInventory):
            if how == "nonsense":
                sys.stdout.buffer.write(b"{}\n")
                sys.stdout.buffer.flush()
                time.sleep(600)
            if how == "dies":
                other = log.with_suffix(".died")
                if not other.exists():
                    other.touch()
                    return
            if how == "mute":
                news = None
        if news is not None:
            sys.stdout.buffer.write(encode(news))
            sys.stdout.buffer.flush()


main()
