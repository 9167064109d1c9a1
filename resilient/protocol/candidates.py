"""What workers may go on from: whole snapshots, with the nodes that hold them, as the driver tells it to agents."""

from collections.abc import Sequence
from functools import lru_cache

import msgspec
import zstandard

from checkpoint.framing import Plain, encode
from checkpoint.protocol import SnapshotKey
from checkpoint.typed import built
from resilient.protocol.messages import Start


class Holder(msgspec.Struct, frozen=True, array_like=True):
    """A node that holds a shard. Attributes: address: of its daemon, host:port; directory: of the shard, there."""

    node: int
    address: str
    directory: str


class Candidate(Plain, kw_only=True, frozen=True):
    """A whole snapshot.

    Attributes:
        tier: the slowest that is needed to read it.
        shards: of each shard those who hold it, fastest tier first.
    """

    key: SnapshotKey
    tier: str
    shards: tuple[tuple[Holder, ...], ...]


PACKED_BYTES = 32 << 20  # of candidates, unpacked; those of 16,384 nodes are a tenth of that
LEVEL = 9  # 64 KB for 16,000 shards, where zlib makes 220 at its fastest
_candidates: msgspec.json.Decoder[tuple[Candidate, ...]] = msgspec.json.Decoder(built(tuple[Candidate, ...]))


def pack(candidates: Sequence[Candidate]) -> bytes:
    """Candidates, newest first, as bytes. Thousands of nodes get the same: it is made once, and small."""
    return zstandard.ZstdCompressor(LEVEL).compress(msgspec.json.encode(candidates)) if candidates else b""


def encode_start(start: Start) -> bytes:
    """As `encode`. Its candidates, a megabyte with thousands of nodes, are encoded for the first of those who get the same."""
    if not start.candidates:
        return encode(start)
    own = encode(msgspec.structs.replace(start, candidates=b""))  # which leaves the field out
    return own.removesuffix(b"}\n") + last_member(start.candidates)


@lru_cache(maxsize=1)
def last_member(candidates: bytes) -> bytes:
    """Candidates as the last member of a message, with the message's end."""
    return b',"candidates":' + msgspec.json.encode(candidates) + b"}\n"


def unpack(packed: bytes) -> tuple[Candidate, ...]:
    """Raises ValueError."""
    try:
        if not packed:
            return ()
        size = zstandard.frame_content_size(packed)  # -1: unknown
        if not 0 <= size <= PACKED_BYTES:
            raise ValueError(f"it does not say how large it is, or is more than {PACKED_BYTES} bytes")
        return _candidates.decode(zstandard.ZstdDecompressor().decompress(packed, allow_extra_data=False))
    except (zstandard.ZstdError, ValueError, RecursionError) as error:
        raise ValueError(f"not a list of candidates: {error}") from None
