"""The handshake: both ends of a connection prove that they know a key, by challenge and response (HMAC-SHA256).

    client ─► server    Authenticate    role, subject, a nonce, and a proof that the client knows the key of the role
    server ─► client    Challenge       a nonce, and a proof over both nonces
    client ─► server    Response        a proof over both nonces

The first proof lets a server refuse strangers before it keeps anything of them; it can be replayed, and a server takes each nonce
once. The other two are over nonces of both ends and cannot. All of them cover the role and the subject (who the client is), so that
both are bound to the connection. The last two cover the server's address as well: whoever listens elsewhere cannot pass for the
server by passing on what is said. What follows the handshake is neither encrypted nor signed, unless the key asks for TLS
(`encrypting`): then both ends derive from it, and from all that was said, the key of this connection for `checkpoint.tls`. A key
that asks for TLS is another key, so that nobody can talk the two ends out of it.

The state machines here know no socket; `authenticate` is the client's end over one that blocks.
"""

import hmac
import ipaddress
import secrets
import socket
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import msgspec

from checkpoint import tls
from checkpoint.framing import Decoder, Message, NotAMessage, encode

DRIVER_AGENT = "driver-agent"
DAEMON_DAEMON = "daemon-daemon"
WORKER_DAEMON = "worker-daemon"

HANDSHAKE_BYTES = 4096
"""Of all that a client says before it is let in, and of what a server answers."""

NONCE_BYTES = 16
POLL_S = 0.5
TLS_MARK = "tls-"  # before a token, and before all keys that follow from it
REMEMBERED = 1 << 16  # nonces of clients, by a server


class Authenticate(Message, frozen=True):
    """A client's first message. Attributes: subject: who it is, in its role."""

    role: str
    subject: str
    nonce: str
    proof: str


class Challenge(Message, frozen=True):
    """The server's answer."""

    nonce: str
    proof: str


class Response(Message, frozen=True):
    """The client's answer to that; after it the client is let in."""

    proof: str


class Refused(ConnectionError):
    """The other end has not proved that it knows the key."""


def derive(token: str, purpose: str) -> str:
    """The key for a role, or a name that only those know who have the token; nobody gets from it to the token."""
    mark = TLS_MARK if token.startswith(TLS_MARK) else ""
    return mark + hmac.new(token.encode(), b"resilient " + purpose.encode(), sha256).hexdigest()


def encrypting(token: str) -> str:
    """The token of a campaign whose connections go over TLS: each process that is given a key of it knows so by the key."""
    return TLS_MARK + token


def daemon_keys(token: str) -> dict[str, str]:
    """The keys of snapshot daemons, by role: theirs among each other, and that of workers who read from them."""
    return {role: derive(token, role) for role in (DAEMON_DAEMON, WORKER_DAEMON)}


def endpoint(address: Any) -> str:
    """An address of a TCP socket as both of its ends write it."""
    host = ipaddress.ip_address(address[0].partition("%")[0])
    mapped = host.ipv4_mapped if isinstance(host, ipaddress.IPv6Address) else None
    return f"{mapped or host} {address[1]}"


def _proof(key: str, step: str, *parts: str) -> str:
    return hmac.new(key.encode(), msgspec.json.encode((step, *parts)), sha256).hexdigest()


def _tls_key(key: str, *parts: str) -> bytes | None:
    """Of one connection, 32 bytes; None where the key asks for no TLS."""
    return bytes.fromhex(_proof(key, "tls", *parts)) if key.startswith(TLS_MARK) else None


def _is(proof: str, expected: str) -> bool:
    return hmac.compare_digest(proof.encode(errors="replace"), expected.encode())


@dataclass(frozen=True)
class Peer:
    """A client that was let in.

    Attributes:
        subject: who it says that it is; others with the same key could say so as well.
        tls_key: of this connection, which goes on over TLS; None: it does not.
    """

    role: str
    subject: str
    tls_key: bytes | None = field(default=None, repr=False)


class Nonces:
    """The nonces that a server has seen in proofs that were right; the oldest are forgotten beyond `REMEMBERED`."""

    def __init__(self) -> None:
        self._seen: OrderedDict[str, None] = OrderedDict()

    def is_new(self, nonce: str) -> bool:
        """Whether it was not seen before; it is from here on."""
        if nonce in self._seen:
            return False
        self._seen[nonce] = None
        if len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)
        return True


class Client:
    """The client's end.

    Args:
        server: `endpoint` of the address to which it has connected.

    Attributes:
        tls_key: once it has responded, that of the TLS with which the connection goes on; None: it goes on without.
    """

    def __init__(self, key: str, role: str, subject: str, server: str) -> None:
        self._key, self._server = key, server
        self._nonce = secrets.token_hex(NONCE_BYTES)
        self._said = (role, subject, self._nonce)
        self.tls_key: bytes | None = None
        self.opening = encode(
            Authenticate(role=role, subject=subject, nonce=self._nonce, proof=_proof(key, "authenticate", *self._said))
        )

    def respond(self, line: bytes) -> bytes:
        """What to say to the server's challenge, after which the client is let in. Raises Refused."""
        try:
            challenge = Decoder[Challenge](Challenge).decode(line)
        except NotAMessage as error:
            raise Refused(f"its answer is {error}") from None
        both = (*self._said, challenge.nonce, self._server)
        if not _is(challenge.proof, _proof(self._key, "challenge", *both)):
            raise Refused("who answers does not know the campaign's secret")
        self.tls_key = _tls_key(self._key, *both)
        return encode(Response(proof=_proof(self._key, "response", *both)))


class Server:
    """The server's end of one connection.

    Args:
        keys: by role, of the clients that are let in.
        nonces: of all connections of this server.
        server: `endpoint` of the address to which the client has connected.
    """

    def __init__(self, keys: Mapping[str, str], nonces: Nonces, server: str) -> None:
        self._keys, self._nonces, self._server = keys, nonces, server
        self._key = self._response = ""
        self._peer: Peer | None = None

    @property
    def challenged(self) -> bool:
        """Whether the client has shown that it, or somebody whom it has heard, knows the key."""
        return self._peer is not None

    def challenge(self, line: bytes) -> bytes:
        """The answer to a client's first line. Raises NotAMessage, Refused."""
        opening = Decoder[Authenticate](Authenticate).decode(line)
        said = (opening.role, opening.subject, opening.nonce)
        self._key = self._keys.get(opening.role, "")
        if not self._key or not _is(opening.proof, _proof(self._key, "authenticate", *said)):
            raise Refused("it does not know the campaign's secret")
        if not self._nonces.is_new(opening.nonce):
            raise Refused("it repeats what another connection has said")
        nonce = secrets.token_hex(NONCE_BYTES)
        both = (*said, nonce, self._server)
        self._peer = Peer(opening.role, opening.subject, _tls_key(self._key, *both))
        self._response = _proof(self._key, "response", *both)
        return encode(Challenge(nonce=nonce, proof=_proof(self._key, "challenge", *both)))

    def admit(self, line: bytes) -> Peer:
        """Who the client is, by its second line. Raises NotAMessage, Refused."""
        response = Decoder[Response](Response).decode(line)
        if self._peer is None or not _is(response.proof, self._response):
            raise Refused("it repeats what another connection has said")
        return self._peer


def authenticate(
    connection: socket.socket,
    key: str,
    role: str,
    subject: str = "",
    *,
    timeout_s: float,
    given_up: Callable[[], bool] = lambda: False,
) -> socket.socket:
    """Prove to a server who this is, and have it prove itself; the socket to go on with, whose timeout is `timeout_s`.

    It is the same one, or where the key asks for TLS another in its place.

    Args:
        given_up: asked twice a second, whether nobody waits for it any more.

    Raises:
        OSError: the server has not answered in that time, or has hung up; or nobody waits any more.
        Refused: it does not know the key.
    """
    deadline = time.monotonic() + timeout_s
    client = Client(key, role, subject, endpoint(connection.getpeername()))
    connection.settimeout(timeout_s)
    connection.sendall(client.opening)
    answer = b""
    while b"\n" not in answer:
        if len(answer) >= HANDSHAKE_BYTES:
            raise Refused(f"its answer is longer than {HANDSHAKE_BYTES} bytes")
        left_s = deadline - time.monotonic()
        if left_s <= 0 or given_up():
            raise TimeoutError(f"no answer within {timeout_s:.0f} s")
        connection.settimeout(min(left_s, POLL_S))
        try:
            data = connection.recv(HANDSHAKE_BYTES - len(answer))
        except TimeoutError:
            continue
        if not data:
            raise ConnectionResetError("it has hung up instead of an answer")
        answer += data
    line, _, more = answer.partition(b"\n")
    if more:
        raise Refused("it says more than was asked")
    connection.settimeout(timeout_s)
    connection.sendall(client.respond(line))
    return connection if client.tls_key is None else tls.secured(connection, client.tls_key)
