"""How many tokens' logits there are at a time, and what the loss holds for it. Pure, without torch.

Chunks follow from sizes alone: the same micro batch is cut into the same ones wherever it is computed. Blocks change no number.
"""

LIMIT_BYTES = 1 << 30  # of the logits of a chunk
BLOCKS = 16  # a chunk of the limit is worked on in so many parts, in fp32
CACHED_BYTES = 1 << 20  # such a part on a CPU, whose second-level cache it fits


def chunk_rows(tokens: int, vocab: int, number_bytes: int, limit_bytes: int = LIMIT_BYTES) -> int:
    """Tokens of a chunk: all, or a half, a quarter and so on of them, so that their logits stay below the limit.

    Args:
        vocab: of this rank.
        number_bytes: of a logit.
    """
    chunks = 1
    while chunks < tokens and -(-tokens // chunks) * vocab * number_bytes > limit_bytes:
        chunks *= 2
    return -(-tokens // chunks)


def block_rows(vocab: int, limit_bytes: int = LIMIT_BYTES, *, cpu: bool) -> int:
    """Tokens whose logits are in fp32 at a time."""
    limit = limit_bytes // BLOCKS
    return max(1, (min(limit, CACHED_BYTES) if cpu else limit) // (4 * vocab))


def loss_bytes(tokens: int, vocab: int, number_bytes: int, limit_bytes: int = LIMIT_BYTES, *, cpu: bool) -> int:
    """Of the logits of a chunk, which become their own gradient, and of a block of them in fp32."""
    rows = chunk_rows(tokens, vocab, number_bytes, limit_bytes)
    return rows * vocab * number_bytes + min(rows, block_rows(vocab, limit_bytes, cpu=cpu)) * vocab * 4
