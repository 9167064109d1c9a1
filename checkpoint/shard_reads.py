"""Reading of another node's shards from its snapshot daemon, over TCP: a request, a reply, and the bytes behind it.

Asked by daemons and by workers that restore (`checkpoint.tiers.remote`), answered by `checkpoint.daemon.server`.
"""

from checkpoint.framing import Message


class ReadRequest(Message, frozen=True):
    """A range of a file in a shard's directory; all of it without a length."""

    directory: str
    file: str
    offset: int = 0
    length: int | None = None


class ReadReply(Message, frozen=True):
    """So many bytes follow; or none, and why."""

    size_bytes: int = 0
    error: str | None = None
