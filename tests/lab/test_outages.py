"""The control connection over a link that is down for long."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from campaigns import ROOT, wait_for

from chaos.lab.lab import Lab
from chaos.lab.shape import address

DRIVER = """
import asyncio, logging, socket, sys, time
from checkpoint.framing import encode
from checkpoint.handshake import DRIVER_AGENT, derive
from checkpoint.listener import Listener, stream
from resilient.protocol.connection import outlast_outages
from resilient.protocol.messages import Ping
async def serve(connection, peer):
    if RESEND:
        outlast_outages(connection)
    reader, writer = await stream(connection, peer, limit_bytes=1 << 16)
    async def ping():
        while True:
            writer.write(encode(Ping(generation=0)))
            await asyncio.sleep(0.25)
    asyncio.ensure_future(ping())
    async for line in reader:
        print(f"up {time.time()}", flush=True)
async def main():
    keys = {DRIVER_AGENT: derive("secret", DRIVER_AGENT)}
    listening = socket.create_server(("0.0.0.0", 7777))
    server = Listener([listening], keys, lambda c, peer: asyncio.ensure_future(serve(c, peer)), logging.getLogger())
    await asyncio.Event().wait()
asyncio.run(main())
"""
AGENT = """
import select, sys, time
from resilient.protocol import connection as protocol
from resilient.protocol.messages import Alive
if not RESEND:
    protocol.outlast_outages = lambda _: None
connection = protocol.Connection([(sys.argv[1], 7777)], token="secret", node=0, incarnation=1, timeout_s=60.0)
while True:
    connection.send(Alive(generation=0))
    if select.select([connection], [], [], 0.25)[0] and connection.receive():
        print(f"down {time.time()}", flush=True)
"""
# Long enough for pauses that double to have grown to more than ten seconds, of which several are left.
OUTAGE_S = 14.0


@pytest.fixture
def talk(bare: Lab, tmp_path: Path) -> Iterator[Callable[[bool], float]]:
    """How long after an outage both ends hear of each other again, with the options of the control connection or without."""
    processes: list[subprocess.Popen[bytes]] = []

    def start(name: str, host: str, code: str, *arguments: str) -> Path:
        out = tmp_path / name
        command = bare.command(["env", f"PYTHONPATH={ROOT}", sys.executable, "-c", code, *arguments], host=host)
        with out.open("wb") as file:
            processes.append(subprocess.Popen(command, stdout=file, stderr=file))
        return out

    def heard(out: Path) -> float:
        words = out.read_text().split()
        return float(words[-1]) if len(words) > 1 and words[0] in ("up", "down") else 0.0

    def measure(resend: bool) -> float:
        files = [start("driver", "n1", f"RESEND = {resend}\n{DRIVER}")]
        files.append(start("agent", "n2", f"RESEND = {resend}\n{AGENT}", address("n1")))
        wait_for(lambda: all(map(heard, files)), "a first word: " + "".join(each.read_text() for each in files))
        bare.flap("n2", OUTAGE_S)
        back_t = time.time()
        wait_for(lambda: all(heard(each) > back_t for each in files), "a word after the outage")
        return time.time() - back_t

    yield measure
    for process in processes:
        process.kill()
        process.wait()


def test_a_control_connection_is_alive_again_as_soon_as_its_link(talk: Callable[[bool], float]):
    assert talk(True) < 10.0  # without the options it is the rest of a pause of thirteen seconds
