"""A reader of what others have written, as it is given damaged inputs."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

CORPUS = Path(__file__).with_name("corpus")
Call = Callable[[bytes], object]


@dataclass(frozen=True)
class Decoder:
    """One reader.

    Attributes:
        inputs: real ones, which it reads without an error.
        errors: with which it may refuse all others.
        repair: makes checksums of an input right again.
    """

    name: str
    inputs: Callable[[], list[bytes]]
    call: Call
    errors: tuple[type[BaseException], ...] = ()
    repair: Callable[[bytes], bytes] | None = None


def in_file(path: Path, use: Callable[[Path], object]) -> Call:
    """A call with the input in a file."""
    path.parent.mkdir(parents=True, exist_ok=True)

    def call(data: bytes) -> object:
        path.write_bytes(data)
        return use(path)

    return call


def corpus(name: str) -> Callable[[], list[bytes]]:
    return lambda: [(CORPUS / name).read_bytes()]
