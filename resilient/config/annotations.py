"""What the schema allows at a key, in words: its type annotations, walked and told. Pure."""

import re
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from resilient.config.schema import Config

Key = tuple[str, ...]


def walk(loc: Sequence[str | int], root: type[BaseModel] = Config) -> tuple[Key, Any, FieldInfo | None]:
    """The key of a finding in a model, without the names of union branches, its annotation and its field."""
    key: list[str] = []
    annotation: Any = root
    field: FieldInfo | None = None
    for part in loc:
        models = [option for option in _options(annotation) if isinstance(option, type) and issubclass(option, BaseModel)]
        lists = [option for option in _options(annotation) if typing.get_origin(option) in (list, tuple)]
        if isinstance(part, int) and lists:
            key.append(str(part))
            arguments = typing.get_args(lists[0])
            annotation, field = arguments[min(part, len(arguments) - 1)], None
        elif models and (annotation is root or isinstance(part, str)):
            if (known := _field(models[0], str(part))) is not None:
                field, annotation = known, known.annotation
            elif part != loc[-1]:
                continue  # the name of a branch of a union
            key.append(str(part))
        elif typing.get_origin(annotation) is dict:
            key.append(str(part))
            annotation, field = typing.get_args(annotation)[1], None
        elif annotation is Any:
            key.append(str(part))
    return tuple(key), annotation, field


def _field(model: type[BaseModel], key: str) -> FieldInfo | None:
    """The field that a key of a file stands for."""
    return next((field for name, field in model.model_fields.items() if key == (field.alias or name)), None)


def _options(annotation: Any) -> list[Any]:
    """The branches of a union, without Annotated."""
    if typing.get_origin(annotation) is Annotated:
        annotation = typing.get_args(annotation)[0]
    if typing.get_origin(annotation) in (Union, types.UnionType):
        return [branch for option in typing.get_args(annotation) for branch in _options(option)]
    return [annotation]


def section_of(key: Key, root: type[BaseModel] = Config) -> type[BaseModel] | None:
    """The section that a key names; None where it names none."""
    annotation: Any = root
    for part in key:
        options = _options(annotation)
        models = [option for option in options if isinstance(option, type) and issubclass(option, BaseModel)]
        lists = [option for option in options if typing.get_origin(option) is list]
        if part.isdigit() and lists:
            annotation = typing.get_args(lists[0])[0]
        elif models and (field := _field(models[0], part)) is not None:
            annotation = field.annotation
        elif typing.get_origin(annotation) is dict:
            annotation = typing.get_args(annotation)[1]
        else:
            return None
    found = [option for option in _options(annotation) if isinstance(option, type) and issubclass(option, BaseModel)]
    return found[0] if found else None


def keys_of(section: type[BaseModel]) -> list[str]:
    """What its keys are called in a file."""
    return [field.alias or name for name, field in section.model_fields.items()]


def keys_called(name: str, section: type[BaseModel] = Config) -> list[Key]:
    """The keys of all sections whose last part is this name; entries of lists are not among them."""
    found: list[Key] = []
    for own, field in section.model_fields.items():
        if own == name:
            found.append((own,))
        for option in _options(field.annotation):
            if isinstance(option, type) and issubclass(option, BaseModel):
                found += [(own, *below) for below in keys_called(name, option)]
    return found


def meant(annotation: Any, text: str) -> str | None:
    """How a text is to be written to be the number or boolean that it looks like, where none but these are allowed."""
    kinds = {option for option in _options(annotation) if isinstance(option, type)}
    if bool in kinds and text in ("true", "false"):
        return text
    if int not in kinds or kinds & {float, str, Path} or _NUMBER.fullmatch(text) is None:
        return None
    number = float(text)
    return str(int(number)) if number.is_integer() and number < _EXACT else None


_NUMBER = re.compile(r"[0-9]{1,16}(\.[0-9]{0,16})?([eE]\+?[0-9]{1,2})?")  # also as YAML takes for text: 1e3
_EXACT = 1 << 53  # below it a float tells one whole number from the next
_NAMES: dict[Any, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "text", Path: "a path"}


def allowed(annotation: Any, field: FieldInfo | None = None) -> str:
    """What a key may be, in words."""
    limits = list(field.metadata) if field is not None else []
    words = []
    for option in _union_parts(annotation):
        base, extra = (option, []) if typing.get_origin(option) is not Annotated else _unpack(option)
        words.append(_word(base, [*limits, *extra]))
    return " or ".join(dict.fromkeys(words))


def allowed_keys(annotation: Any) -> str | None:
    """What the keys of a mapping may be, in words; None where something else may stand in its place."""
    return allowed(typing.get_args(annotation)[0]) if typing.get_origin(annotation) is dict else None


def _union_parts(annotation: Any) -> list[Any]:
    if typing.get_origin(annotation) in (Union, types.UnionType):
        return [part for option in typing.get_args(annotation) for part in _union_parts(option)]
    return [annotation]


def _unpack(option: Any) -> tuple[Any, list[Any]]:
    base, *metadata = typing.get_args(option)
    return base, [entry for item in metadata for entry in (item.metadata if isinstance(item, FieldInfo) else [item])]


def _word(base: Any, limits: list[Any]) -> str:
    origin = typing.get_origin(base)
    if origin is Literal:
        return ", ".join(str(choice) for choice in typing.get_args(base))
    if base is type(None):
        return "null"
    if origin is list:
        entry = typing.get_args(base)[0]
        return "a list" if entry is Any else f"a list (of {allowed(entry)})"
    if origin is tuple:
        arguments = typing.get_args(base)
        return f"a list of {len(arguments)} (each {allowed(arguments[0])})"
    if origin is dict or (isinstance(base, type) and issubclass(base, BaseModel)):
        fields: dict[str, FieldInfo] | None = getattr(base, "model_fields", None)
        names = [field.alias or name for name, field in fields.items()] if fields else []
        return f"a mapping with the keys {', '.join(names)}" if names else "a mapping"
    bounds = []
    for limit in limits:
        for attribute_name, text in (("ge", "at least"), ("gt", "above"), ("le", "at most"), ("lt", "below")):
            bound = getattr(limit, attribute_name, None)
            if bound is not None:
                bounds.append(f"{text} {bound}")
        pattern = getattr(limit, "pattern", None)
        if pattern is not None:
            bounds.append(f"of the form {pattern}")
    name = _NAMES.get(base, str(base))
    return f"{name}, {' and '.join(bounds)}" if bounds else name
