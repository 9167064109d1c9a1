"""Where a dataset is cut into training, validation and test. Pure.

A split is a stretch of the tokens in proportion to its share. The cuts fall between documents, as near to the proportion as these
allow, and move as far as it takes to give every split that has a share at least one sample. Where whole documents cannot do that,
as when a book is a single document, the cuts fall inside documents.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable

Shares = tuple[int, int, int]


def split_tokens(shares: Shares, need: int, documents: int, boundary: Callable[[int], int]) -> tuple[int, int, int, int] | None:
    """Boundaries of the three splits, in tokens; None if even all tokens are too few.

    Args:
        shares: not negative, and not all 0.
        need: tokens of one sample.
        boundary: the token at which a document starts; for `documents`, the number of tokens.
    """
    total = boundary(documents)
    places = range(documents + 1)

    def below(token: int) -> int:
        return boundary(max(0, bisect_right(places, token, key=boundary) - 1))

    def above(token: int) -> int:
        return boundary(min(documents, bisect_left(places, token, key=boundary)))

    def same(token: int) -> int:
        return token

    return _cut(shares, need, total, below, above) or _cut(shares, need, total, same, same)


def _cut(
    shares: Shares, need: int, total: int, below: Callable[[int], int], above: Callable[[int], int]
) -> tuple[int, int, int, int] | None:
    """Cut at allowed places: `below` and `above` give the next one that is not greater and not less."""
    first, second, third = (need if share else 0 for share in shares)
    if first + second + third > total:
        return None

    def nearest(share: int, low: int, high: int) -> int:
        ideal = total * share // sum(shares)
        down, up = below(ideal), above(ideal)
        return min(max(down if ideal - down <= up - ideal else up, low), high)

    last_second = below(total - third)
    last_first = below(max(0, last_second - second))
    if last_second < second or above(first) > last_first:
        return None
    one = nearest(shares[0], above(first), last_first)
    two = nearest(shares[0] + shares[1], above(one + second), last_second)
    return 0, one, two, total
