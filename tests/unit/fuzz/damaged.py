"""Damage to real inputs: bytes, lines, numbers, lengths and, where an input is JSON, any value of it."""

import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

WORDS = (
    b"", b"\0", b"\n", b"\r\n", b"\xff", b"\xef\xbb\xbf", b"..", b"/", b"../../x", b"/etc/passwd", b"-1", b"0", b"-0", b"1e999",
    b"NaN", b"Infinity", b"null", b"true", b"[]", b"{}", b'""', b"[", b"{", b"9" * 25, b"9" * 5000, b"2147483648",
    b"9223372036854775808", b"18446744073709551615", b"[" * 3000, b'{"a":' * 3000, b'"\\ud800"', b"[0-999999999]",
    b"(x999999999)", b"*a", b"&a [*a]", b"\xc2\xb2",
)  # fmt: skip
NUMBERS = (
    0, 1, -1, 2, 7, 255, 4095, 1 << 31, -(1 << 31), (1 << 32) - 1, (1 << 53) + 1, (1 << 63) - 1, 1 << 63, -(1 << 63),
    (1 << 64) - 1, 10**30,
)  # fmt: skip


def _deep(depth: int) -> Any:
    found: Any = 1
    for _ in range(depth):
        found = [found]
    return found


VALUES: tuple[Any, ...] = (
    *NUMBERS, None, True, False, 0.5, -0.0, 1e308, float("nan"), float("inf"), "", "x", "..", "../../.bashrc", "/etc/passwd",
    "a\0b", "\ud800", "9" * 30, "é\u2028", [], [1], [-1, 10**9], [[0, 10**9]], {}, {"a": 1}, {"": None}, _deep(40), "x" * 5000,
)  # fmt: skip
_DIGITS = re.compile(rb"\d+")


def parsed(text: bytes) -> Any:
    """What a text says as JSON, or as lines of JSON (a list of one more element, None, at its end); None if it is neither."""
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        found = [json.loads(line) for line in text.splitlines()]
    except ValueError:
        return None
    return _Lines(found) if len(found) > 1 else None


class _Lines(list[Any]):
    """One JSON value a line."""


def dumped(found: Any) -> bytes:
    """The text of what `parsed` gave."""
    if isinstance(found, _Lines):
        return b"".join(dumped(each) + b"\n" for each in found)
    return json.dumps(found).encode()


def changed(found: Any, dice: random.Random, value: Callable[[], Any]) -> Any:
    """The same with one value anywhere in it exchanged, left out, doubled, or under another name."""
    if isinstance(found, dict) and found and dice.random() < 0.9:
        key = dice.choice(list(found))
        what = dice.random()
        if what < 0.1:
            return {name: each for name, each in found.items() if name != key}
        if what < 0.2:
            return {(f"{name}x" if name == key else name): each for name, each in found.items()}
        return {**found, key: changed(found[key], dice, value)}
    if isinstance(found, list) and found and dice.random() < 0.9:
        place, what = dice.randrange(len(found)), dice.random()
        if what < 0.1:
            new = found[:place] + found[place + 1 :]
        elif what < 0.2:
            new = found[:place] + [found[place]] * dice.randrange(2, 5) + found[place + 1 :]
        else:
            new = [*found[:place], changed(found[place], dice, value), *found[place + 1 :]]
        return type(found)(new)
    return value()


class Mutator:
    """Makes inputs that are nearly right.

    Args:
        inputs: real ones.
        repair: makes checksums right again; half of the inputs are repaired.
    """

    def __init__(self, inputs: Sequence[bytes], repair: Callable[[bytes], bytes] | None, dice: random.Random) -> None:
        self._inputs, self._repair, self._dice = list(inputs), repair, dice
        self._trees = [tree for tree in map(parsed, inputs) if tree is not None]

    def __call__(self) -> bytes:
        dice = self._dice
        if self._trees and dice.random() < 0.5:
            tree = dice.choice(self._trees)
            for _ in range(dice.choice((1, 1, 1, 2, 4))):
                tree = changed(tree, dice, lambda: dice.choice(VALUES))
            text = dumped(tree)
        else:
            text = dice.choice(self._inputs)
            for _ in range(dice.choice((1, 1, 2, 3, 8))):
                text = dice.choice(_WAYS)(text, dice, self._inputs)
        if self._repair is not None and dice.random() < 0.5:
            text = self._repair(text)
        return text


def _flip(text: bytes, dice: random.Random, _: Sequence[bytes]) -> bytes:
    if not text:
        return text
    at = dice.randrange(len(text))
    return text[:at] + bytes([text[at] ^ (1 << dice.randrange(8))]) + text[at + 1 :]


def _cut(text: bytes, dice: random.Random, _: Sequence[bytes]) -> bytes:
    at = dice.randrange(len(text) + 1)
    return text[:at] if dice.random() < 0.7 else text[at:]


def _splice(text: bytes, dice: random.Random, inputs: Sequence[bytes]) -> bytes:
    other = dice.choice(inputs)
    start = dice.randrange(len(other) + 1)
    return (
        text[: dice.randrange(len(text) + 1)] + other[start : start + dice.randrange(200)] + text[dice.randrange(len(text) + 1) :]
    )


def _leave_out(text: bytes, dice: random.Random, _: Sequence[bytes]) -> bytes:
    at = dice.randrange(len(text) + 1)
    return text[:at] + text[at + dice.randrange(1, 20) :]


def _insert(text: bytes, dice: random.Random, _: Sequence[bytes]) -> bytes:
    at = dice.randrange(len(text) + 1)
    return text[:at] + dice.choice(WORDS) + text[at:]


def _number(text: bytes, dice: random.Random, _: Sequence[bytes]) -> bytes:
    """A number that is written in digits."""
    found = list(_DIGITS.finditer(text))
    if not found:
        return _insert(text, dice, _)
    match = dice.choice(found)
    return text[: match.start()] + str(dice.choice(NUMBERS)).encode() + text[match.end() :]


def _length(text: bytes, dice: random.Random, _: Sequence[bytes]) -> bytes:
    """A number of four or eight bytes, wherever one may be."""
    size = dice.choice((4, 8))
    if len(text) < size:
        return text
    at = dice.randrange(len(text) - size + 1)
    at -= at % 4 if dice.random() < 0.5 else 0
    return text[:at] + (dice.choice(NUMBERS) % (1 << 8 * size)).to_bytes(size, "little") + text[at + size :]


_WAYS = (_flip, _cut, _splice, _leave_out, _insert, _number, _length)
