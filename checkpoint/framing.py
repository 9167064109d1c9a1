"""Framing: typed messages as JSON objects, one a line; the only encoding of messages in the project.

A message is a frozen structure whose class is named by its `type` field. Decoding checks every field against its annotation, so
that what arrives is either a message or refused as a whole.
"""

from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from checkpoint.typed import built

LINE_LIMIT_BYTES = 16 << 20
"""A longer line is refused: no message is as long."""


def _tag(name: str) -> str:
    """`NodeLost` as `node_lost`."""
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).lstrip("_")


class Message(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, tag_field="type", tag=_tag
):
    """Base of all messages. A unit that is not in a field's name stands in its class's docstring."""


class Plain(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of structures within messages."""


class NotAMessage(ValueError):
    """What arrived is not one of the messages that are expected here."""


M = TypeVar("M", bound=Message)

_encoder = msgspec.json.Encoder()


def encode(message: Message) -> bytes:
    """One line, with its end."""
    return _encoder.encode(message) + b"\n"


class Decoder(Generic[M]):
    """Decodes a stream of bytes, in whatever pieces it arrives.

    Args:
        union: the messages that are expected, as a union of classes, or one class.
        limit_bytes: of a line.
    """

    SHOWN: ClassVar[int] = 80

    def __init__(self, union: Any, *, limit_bytes: int = LINE_LIMIT_BYTES) -> None:
        self._decoder: msgspec.json.Decoder[M] = msgspec.json.Decoder(built(union))
        self._limit_bytes = limit_bytes
        self._pending = bytearray()

    def decode(self, line: bytes | bytearray | memoryview) -> M:
        """One message. Raises NotAMessage."""
        try:
            return self._decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise NotAMessage(f"not a message: {error}: {bytes(line[: self.SHOWN])!r}") from None

    def feed(self, data: bytes) -> list[M]:
        """The messages that these bytes complete; an unfinished line is kept for the next call.

        Raises:
            NotAMessage: a line is none, or longer than the limit. The stream is of no use after that.
        """
        self._pending += data
        if b"\n" not in data:
            self._check_length(len(self._pending))
            return []
        *lines, rest = self._pending.split(b"\n")
        self._pending = rest
        self._check_length(max(map(len, (*lines, rest))))
        return [self.decode(line) for line in lines]

    def _check_length(self, size_bytes: int) -> None:
        if size_bytes > self._limit_bytes:
            raise NotAMessage(f"not a message: a line of more than {self._limit_bytes} bytes")
