"""Messages of every type, made from their annotations: what a decoder may be given where nothing real is at hand."""

import random
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import inspect

WORDS = ("ram", "durable", "n1", "10.0.0.1:4711", "/dev/shm/a/node0", "step", "flush", "", "worker_kill")
NUMBERS = (0, 1, 2, 7, 100, 1 << 20)


def structures(union: Any) -> list[inspect.StructType]:
    """The types of messages in a union, or the one."""
    found = inspect.type_info(union)
    each = found.types if isinstance(found, inspect.UnionType) else (found,)
    return [one for one in each if isinstance(one, inspect.StructType)]


def samples(union: Any, seed: int = 1, of_each: int = 3, words: Sequence[str] = WORDS) -> list[Any]:
    """Messages of every type of a union."""
    dice = random.Random(seed)
    return [_made(each, dice, words) for each in structures(union) for _ in range(of_each)]


def _made(info: Any, dice: random.Random, words: Sequence[str]) -> Any:
    match info:
        case inspect.StructType(cls, fields):
            given = {each.name: _made(each.type, dice, words) for each in fields if each.required or dice.random() < 0.7}
            if cls.__name__ == "Record":
                given["text"] = ""
            return cls(**given)
        case inspect.DataclassType(cls, fields):
            return cls(**{each.name: _made(each.type, dice, words) for each in fields if each.required or dice.random() < 0.7})
        case inspect.UnionType(types):
            return _made(dice.choice(types), dice, words)
        case inspect.LiteralType(values):
            return dice.choice(values)
        case inspect.IntType():
            return dice.choice(NUMBERS)
        case inspect.FloatType():
            return float(dice.choice(NUMBERS))
        case inspect.BoolType():
            return dice.random() < 0.5
        case inspect.StrType():
            return dice.choice(words)
        case inspect.BytesType():
            return b"packed"
        case inspect.NoneType():
            return None
        case inspect.AnyType():
            return dice.choice((None, 1, 2.5, "x", [1], {"a": 1}))
        case inspect.VarTupleType(item) | inspect.ListType(item):
            return tuple(_made(item, dice, words) for _ in range(dice.randrange(3)))
        case inspect.TupleType(items):
            return tuple(_made(item, dice, words) for item in items)
        case inspect.DictType(key, value):
            return {_made(key, dice, words): _made(value, dice, words) for _ in range(dice.randrange(3))}
        case inspect.CollectionType(item):
            return tuple(_made(item, dice, words) for _ in range(dice.randrange(3)))
        case inspect.MappingType(key, value) if hasattr(inspect, "MappingType"):
            return {_made(key, dice, words): _made(value, dice, words) for _ in range(dice.randrange(3))}
        case _:
            raise TypeError(f"no sample of {info}")


def encoded(union: Any, seed: int = 1) -> list[bytes]:
    """The same as lines."""
    return [msgspec.json.encode(each) + b"\n" for each in samples(union, seed)]
