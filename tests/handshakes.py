"""The two ends of the handshake for tests: a driver or a daemon over a socket that blocks, and an agent in asyncio."""

import asyncio
import socket
from collections.abc import Mapping

from checkpoint.handshake import DRIVER_AGENT, Client, Nonces, Server, derive, endpoint
from resilient.protocol.connection import subject_of


def let_in(connection: socket.socket, keys: Mapping[str, str]) -> None:
    """The server's end; nothing that follows the handshake is read."""
    server = Server(keys, Nonces(), endpoint(connection.getsockname()))
    connection.sendall(server.challenge(_line(connection)))
    server.admit(_line(connection))


def as_driver(connection: socket.socket, secret: str) -> None:
    let_in(connection, {DRIVER_AGENT: derive(secret, DRIVER_AGENT)})


def _line(connection: socket.socket) -> bytes:
    found = bytearray()
    while not found.endswith(b"\n"):
        data = connection.recv(1)
        assert data, "it hung up in the middle of the handshake"
        found += data
    return bytes(found[:-1])


async def open_agent(port: int, secret: str, node: int, incarnation: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """An agent's connection to a driver on this machine. Raises asyncio.IncompleteReadError where it is refused."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    server = endpoint(writer.get_extra_info("peername"))
    client = Client(derive(secret, DRIVER_AGENT), DRIVER_AGENT, subject_of(node, incarnation), server)
    writer.write(client.opening)
    try:
        writer.write(client.respond((await reader.readuntil(b"\n"))[:-1]))
    except BaseException:
        writer.close()
        raise
    return reader, writer
