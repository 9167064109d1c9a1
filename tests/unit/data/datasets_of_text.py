"""Small texts, and what a dataset that was built of them holds."""

from itertools import pairwise
from pathlib import Path

from trainer.data import tokenizer
from trainer.data.build import Vocabulary
from trainer.data.indexed import IndexedDataset

SMALL = Vocabulary(300)
PROSE = "The order is a pure function of seed, epoch and index. Nothing is stored; nothing is lost.\n"


def texts_of(prefix: Path) -> list[str]:
    data = IndexedDataset(prefix)
    chosen = tokenizer.load(Path(f"{prefix}.tokenizer.json"))
    bounds = [data.boundary(number) for number in range(len(data) + 1)]
    return [chosen.decode(data.tokens[first:last].tolist(), skip_special_tokens=False) for first, last in pairwise(bounds)]


def put(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}
