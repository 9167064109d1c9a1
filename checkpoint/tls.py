"""TLS with a pre-shared key, for what follows the handshake of a connection.

Both ends derive the key from the handshake (`checkpoint.handshake`), a new one for each connection; there are no certificates.
TLS 1.3 with an ephemeral exchange (psk_dhe_ke): who learns the campaign's secret later cannot read what was recorded before.
Python has it since 3.13; `ssl` is imported where a connection asks for it.
"""

import socket
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import ssl

NEEDED = (3, 13)
IDENTITY = "resilient"  # the key is the connection's own and needs no name


def why_not() -> str | None:
    """Why this Python cannot do it, in words; None where it can."""
    if sys.version_info < NEEDED:
        return f"TLS with a pre-shared key needs Python 3.13 or newer, and this is {sys.version_info[0]}.{sys.version_info[1]}"
    import ssl

    if not getattr(ssl, "HAS_PSK", False):
        return f"the library of this Python ({ssl.OPENSSL_VERSION}) has no TLS with pre-shared keys"
    return None


def server_context(key: bytes) -> "ssl.SSLContext":
    """For the server's end of one connection."""
    import ssl

    context: Any = _context(ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0  # no connection is resumed

    def key_of(_: str | None) -> bytes:
        return key

    context.set_psk_server_callback(key_of)
    secure: ssl.SSLContext = context
    return secure


def secured(connection: socket.socket, key: bytes) -> socket.socket:
    """The client's end: the connection over TLS, with the timeout that it had. The one that was given is of no use any more.

    Without a timeout it behaves as a socket does that does not block.

    Raises OSError: the other end has another key, or does not answer.
    """
    import ssl

    context: Any = _context(ssl.PROTOCOL_TLS_CLIENT)

    def key_of(_: str | None) -> tuple[str, bytes]:
        return IDENTITY, key

    context.set_psk_client_callback(key_of)
    context.sslsocket_class = _socket_class()
    secure: socket.socket = context.wrap_socket(connection)
    return secure


def _context(protocol: int) -> Any:
    import ssl

    context = ssl.SSLContext(protocol)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # the key is what both ends prove
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_3
    return context


def _socket_class() -> type["ssl.SSLSocket"]:
    import ssl

    class Socket(ssl.SSLSocket):
        """Says of what would block what other sockets say, so that who reads and writes need not know of TLS."""

        def send(self, data: Any, flags: int = 0) -> int:
            try:
                return super().send(data, flags)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
                raise BlockingIOError(str(error)) from error

        def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
            try:
                return super().recv(buflen, flags)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
                raise BlockingIOError(str(error)) from error

    return Socket
