"""Slurm's compressed lists of host names, written out and folded, without asking scontrol. Pure."""

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

LIMIT = 1 << 17  # names in a list: no machine has so many nodes, and a range may name any number
LIMIT_BRACKETS = 8  # in a name
LIMIT_LETTERS = 255  # in a name, without its numbers in brackets; the kernel's limit is 64

_NUMBERED = re.compile(r"(.*?)(\d{1,18})", re.ASCII | re.DOTALL)
_BRACKETS = re.compile(r"\[[^]]*\]")
SHOWN = 80
_RANGE = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?", re.ASCII)


def expand(text: str) -> list[str]:
    """The names in a list such as `jwb[0001-0003,0007],login1`, in its order.

    Several brackets in a name stand for all combinations; numbers keep their leading zeros.

    Raises:
        ValueError: it is no such list.
    """
    found: list[str] = []
    for part in _parts(text):
        if part.count("[") > LIMIT_BRACKETS:
            raise ValueError(f"more than {LIMIT_BRACKETS} brackets in a name of the host list {text[:SHOWN]!r}")
        if len(_BRACKETS.sub("", part)) > LIMIT_LETTERS:
            raise ValueError(f"a name of more than {LIMIT_LETTERS} letters in the host list {text[:SHOWN]!r}")
        found += islice(_names(part), LIMIT + 1 - len(found))
        if len(found) > LIMIT:
            raise ValueError(f"more than {LIMIT} names in the host list {text[:SHOWN]!r}")
    return found


def fold(names: Iterable[str]) -> str:
    """The list as Slurm writes it, such as `jwb[0001-0003,0007],login1`; `expand` gives the names back in the same order."""
    parts: list[tuple[str, list[tuple[str, str]]]] = []  # a prefix, and the first and last number of each range
    for name in names:
        found = _NUMBERED.fullmatch(name)
        prefix, number = (found[1], found[2]) if found is not None else (name, "")
        if not number or not parts or parts[-1][0] != prefix or not parts[-1][1]:
            parts.append((prefix, [(number, number)] if number else []))
            continue
        ranges = parts[-1][1]
        first, last = ranges[-1]
        if len(last) == len(number) and int(number) == int(last) + 1:
            ranges[-1] = (first, number)
        else:
            ranges.append((number, number))
    return ",".join(_folded(prefix, ranges) for prefix, ranges in parts)


def lists(names: Sequence[str], limit_bytes: int) -> Iterator[str]:
    """Lists as `fold` writes them, none longer than that unless it is of one name, and together of all names, in their order."""
    text = fold(names)
    if len(text.encode()) <= limit_bytes or len(names) < 2:
        yield text
        return
    half = len(names) // 2
    yield from lists(names[:half], limit_bytes)
    yield from lists(names[half:], limit_bytes)


def _folded(prefix: str, ranges: list[tuple[str, str]]) -> str:
    texts = [first if first == last else f"{first}-{last}" for first, last in ranges]
    if len(texts) == 1 and "-" not in texts[0]:
        return prefix + texts[0]
    return f"{prefix}[{','.join(texts)}]" if texts else prefix


def _parts(text: str) -> Iterator[str]:
    """The parts between commas that are outside of brackets."""
    depth, start = 0, 0
    for position, letter in enumerate(text):
        depth += {"[": 1, "]": -1}.get(letter, 0)
        if depth not in (0, 1):
            break
        if letter == "," and not depth:
            yield text[start:position]
            start = position + 1
    if depth:
        raise ValueError(f"brackets do not match in the host list {text!r}")
    if text[start:]:
        yield text[start:]


def _names(part: str) -> Iterator[str]:
    before, bracket, rest = part.partition("[")
    if not bracket:
        if not part:
            raise ValueError("an empty name in a host list")
        yield part
        return
    inside, _, after = rest.partition("]")
    for piece in inside.split(","):
        found = _RANGE.fullmatch(piece)
        if found is None:
            raise ValueError(f"{piece!r} is no number or range of numbers in the host list {part!r}")
        first, last = found[1], found[2] or found[1]
        if int(last) < int(first):
            raise ValueError(f"{piece!r} is a range that goes backwards in the host list {part!r}")
        for number in range(int(first), int(last) + 1):
            for ending in _names(after) if after else ("",):
                yield f"{before}{number:0{len(first)}}{ending}"


def counts(text: str) -> list[int]:
    """The numbers in a list such as `48(x3),24`, one for each node. Raises ValueError if it is no such list."""
    found: list[int] = []
    for piece in text.split(","):
        match = re.fullmatch(r"(\d{1,9})(?:\(x(\d{1,9})\))?", piece, re.ASCII)
        if match is None:
            raise ValueError(f"{piece[:SHOWN]!r} is no count of CPUs")
        times = int(match[2] or 1)
        if len(found) + times > LIMIT:
            raise ValueError(f"counts of CPUs for more than {LIMIT} nodes")
        found += [int(match[1])] * times
    return found
