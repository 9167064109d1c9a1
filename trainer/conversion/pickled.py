"""Pickles of others, read without running what they name.

Whatever class or function a file names, an `Inert` object stands for it, which keeps what it was made of and does nothing. Tensors
stay in the file until they are used.
"""

import io
import pickle
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from trainer.conversion.families import ImportRefused, SourceUnusable

_MOST_BYTES = 1 << 30  # of a description in a pickle

# What a damaged pickle, or the zip archive around it, may end in.
_DAMAGE = (
    *(pickle.UnpicklingError, zipfile.BadZipFile, EOFError, LookupError, ValueError, TypeError, AttributeError),
    *(AssertionError, RuntimeError, ArithmeticError, MemoryError, BufferError, struct.error),
)


class Inert:
    """Stands for an object of any class.

    Attributes:
        name: of the class or function, with its module.
        args: that it was called with.
        state: that it was given.
    """

    name: ClassVar[str] = ""
    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any, **options: Any) -> "Inert":
        made = object.__new__(cls)
        made.args, made.state = args, None
        return made

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state


def stand_in(name: str) -> type[Inert]:
    """What stands for a class or function of that name."""
    return type("Inert", (Inert,), {"name": name})


def fields(value: object) -> Mapping[str, Any]:
    """The attributes of an object that something inert stands for; none of anything else."""
    state = value.state if isinstance(value, Inert) else None
    if isinstance(state, tuple) and len(state) == 2:
        state = state[0]
    return state if isinstance(state, dict) else {}


def load_saved(path: Path) -> Any:
    """What `torch.save` has written; the tensors are mapped. Raises ImportRefused, OSError."""
    try:
        with path.open("rb") as file:
            names = _names(file)
        with torch.serialization.safe_globals([(stand_in(name), name) for name in names]):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except _DAMAGE as error:
        raise SourceUnusable(f"{path} is no whole file of torch.save in its present format: {_short(error)}") from error


def load_part(path: Path, offset: int, length: int) -> Any:
    """What `torch.save` has written into a part of a file. Raises ImportRefused, OSError."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, io.SEEK_END)
            if offset < 0 or length < 1 or offset + length > size:
                raise SourceUnusable(f"{path} has {size} bytes, and should have {length} at {offset}")
            file.seek(offset)
            part = io.BytesIO(file.read(length))
        names = _names(part)
        part.seek(0)
        with torch.serialization.safe_globals([(stand_in(name), name) for name in names]):
            return torch.load(part, map_location="cpu", weights_only=True)
    except _DAMAGE as error:
        raise SourceUnusable(f"{path} is damaged from byte {offset} on: {_short(error)}") from error


def load_description(path: Path) -> Any:
    """What a pickle without tensors describes. Raises ImportRefused, OSError."""
    with path.open("rb") as file:
        if file.seek(0, io.SEEK_END) > _MOST_BYTES:
            raise ImportRefused(f"{path} has more than {_MOST_BYTES >> 20} MiB")
        file.seek(0)
        try:
            return _Descriptions(file).load()
        except _DAMAGE as error:
            raise SourceUnusable(f"{path} is damaged: {_short(error)}") from error


def is_tensor(value: object) -> bool:
    """Whether it is a plain tensor of floats that may be read: dense, with no more numbers than are stored."""
    if type(value) is not Tensor or value.layout is not torch.strided or not value.is_floating_point():
        return False
    return value.numel() * value.element_size() <= value.untyped_storage().nbytes()


class _Descriptions(pickle._Unpickler):
    """The slow one, written in Python: a damaged index into its memo takes no memory.

    It lacks the operations that would take memory for bytes that are not there, or look something up elsewhere.
    """

    dispatch: ClassVar[Any] = {
        code: method
        for code, method in pickle._Unpickler.dispatch.items()
        if code not in {each[0] for each in (pickle.BYTEARRAY8, pickle.NEXT_BUFFER, pickle.EXT1, pickle.EXT2, pickle.EXT4)}
    }

    def find_class(self, module: str, name: str) -> type[Inert]:
        return stand_in(f"{module}.{name}")


def _names(file: Any) -> list[str]:
    """Of what else than tensors a file of torch.save would make. Raises what damage ends in."""
    with zipfile.ZipFile(file) as archive:
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
            raise ValueError("it is compressed")
    file.seek(0)
    return torch.serialization.get_unsafe_globals_in_checkpoint(file)


def _short(error: BaseException) -> str:
    """The first line; of torch's long advice the one that says what was wrong."""
    text = str(error).rpartition("WeightsUnpickler error: ")[2].strip()
    return text.partition("\n")[0][:200] or type(error).__name__
