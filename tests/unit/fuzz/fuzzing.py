"""A process that gives decoders what nobody should give them, and tells what they did that they should not.

`python fuzzing.py COUNT SEED WITNESS [NAME...]`: COUNT damaged inputs for each decoder, and a tenth as many by Hypothesis. It ends
with 0, or with 1 after it has printed every kind of failure once. A decoder that takes more than CPU_S of processor time ends the
process by SIGPROF, and one that damages the process by whatever comes of it: the input is in the file WITNESS then.
"""

import faulthandler
import logging
import mmap
import random
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from damaged import Mutator, changed, dumped, parsed
from decoder import Decoder
from decoders import decoders
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

CPU_S = 10.0  # of one input
MEMORY_BYTES = 200 << 20  # of one input
_PAGE_BYTES = resource.getpagesize()
WITNESS_BYTES = 1 << 20
SHOWN = 400


class Witness:
    """Holds the input at hand, for those who find the process dead."""

    def __init__(self, path: Path) -> None:
        with path.open("w+b") as file:
            file.truncate(WITNESS_BYTES)
            self._map = mmap.mmap(file.fileno(), WITNESS_BYTES)

    def see(self, name: str, data: bytes) -> None:
        head = f"{name} {len(data)}\n".encode()
        data = data[: WITNESS_BYTES - len(head)]
        self._map[: len(head)] = head
        self._map[len(head) : len(head) + len(data)] = data

    @staticmethod
    def seen(path: Path) -> tuple[str, bytes]:
        """Which decoder had what, as far as it is there."""
        head, _, data = path.read_bytes().partition(b"\n")
        name, _, size = head.decode().rpartition(" ")
        return name, data[: min(int(size), SHOWN)]

    def __call__(self, decoder: Decoder, data: bytes) -> None:
        self.see(decoder.name, data)
        signal.setitimer(signal.ITIMER_PROF, CPU_S)

    def rest(self) -> None:
        """The decoder is done: what Hypothesis takes for the next input, at first for tables of Unicode, is not its time."""
        signal.setitimer(signal.ITIMER_PROF, 0.0)


def run(decoder: Decoder, count: int, seed: int, witness: Witness) -> dict[str, str]:
    """The failures of one decoder, one of each kind."""
    failures: dict[str, str] = {}
    statm, before = Path("/proc/self/statm"), resource.getrlimit(resource.RLIMIT_AS)

    def tried(data: bytes) -> None:
        witness(decoder, data)
        used = int(statm.read_text().split()[0]) * _PAGE_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, before[1]))
        try:
            decoder.call(data)
        except decoder.errors:
            pass
        except BaseException as error:  # noqa: BLE001 - whatever else comes out is what is looked for
            resource.setrlimit(resource.RLIMIT_AS, before)
            last = traceback.extract_tb(error.__traceback__)[-1]
            kind = f"{type(error).__name__} at {last.filename}:{last.lineno}"
            if kind not in failures:
                failures[kind] = f"{data[:SHOWN]!r}\n{''.join(traceback.format_exception(error)[-12:])}"
        finally:
            witness.rest()
            resource.setrlimit(resource.RLIMIT_AS, before)

    inputs = decoder.inputs()
    for data in inputs:  # what is real is read
        witness(decoder, data)
        decoder.call(data)
        witness.rest()
    try:
        mutator = Mutator(inputs, decoder.repair, random.Random(f"{seed} {decoder.name}"))
        for _ in range(count):
            tried(mutator())
        _by_hypothesis(inputs, max(1, count // 10), tried, decoder.repair)
    finally:
        witness.rest()
        resource.setrlimit(resource.RLIMIT_AS, before)
    return failures


def _by_hypothesis(
    inputs: list[bytes], count: int, tried: Callable[[bytes], None], repair: Callable[[bytes], bytes] | None
) -> None:
    @settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.one_of(_strategies(inputs, repair)))
    def example(data: bytes) -> None:
        tried(data)

    example()


def _strategies(inputs: list[bytes], repair: Callable[[bytes], bytes] | None) -> list[st.SearchStrategy[bytes]]:
    """Any bytes, any text, real inputs with a part written over, and real JSON with any value in any place."""
    places = st.integers(0, 1 << 20)
    ways = [
        st.binary(max_size=300),
        st.text(max_size=200).map(lambda text: text.encode(errors="replace")),
        st.builds(_written_over, st.sampled_from(inputs), places, st.binary(max_size=12)),
    ]
    trees = [tree for tree in map(parsed, inputs) if tree is not None]
    if trees:
        plain = st.integers() | st.floats() | st.booleans() | st.none() | st.text(max_size=20)
        values = st.recursive(
            plain, lambda v: st.lists(v, max_size=4) | st.dictionaries(st.text(max_size=8), v, max_size=4), max_leaves=8
        )
        ways += 3 * [st.builds(_exchanged, st.sampled_from(trees), values, places)]
    return ways if repair is None else [*ways, *(way.map(repair) for way in ways)]


def _written_over(text: bytes, at: int, part: bytes) -> bytes:
    at %= len(text) + 1
    return text[:at] + part + text[at + len(part) :]


def _exchanged(tree: Any, value: Any, seed: int) -> bytes:
    return dumped(changed(tree, random.Random(seed), lambda: value))


def main() -> int:
    count, seed, witness = int(sys.argv[1]), int(sys.argv[2]), Witness(Path(sys.argv[3]))
    logging.disable()
    faulthandler.enable()
    faulthandler.register(signal.SIGPROF, chain=True)
    sys.setrecursionlimit(1000)
    failed = False
    for decoder in decoders(Path(sys.argv[3]).parent):
        if sys.argv[4:] and decoder.name not in sys.argv[4:]:
            continue
        print(f"decoder: {decoder.name}")
        for kind, shown in run(decoder, count, seed, witness).items():
            failed = True
            print(f"== {decoder.name}: {kind}\n{shown}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
