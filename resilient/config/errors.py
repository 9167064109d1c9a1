"""What is wrong with a config: problems, each with its place, all told at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from resilient.exits import Exit, ForeseenError


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        key: dotted, as in `train.steps`; empty for the file as a whole.
        value: what stands there; None where there is nothing to show.
        message: what is wrong and what is allowed.
        file, line: where; a problem without a file came from the command line or the environment, or is not yet attributed.
    """

    key: str
    value: object
    message: str
    file: Path | None = None
    line: int | None = None

    def __str__(self) -> str:
        place = ""
        if self.file is not None:
            place = f"{self.file}:{self.line}: " if self.line is not None else f"{self.file}: "
        elif self.line == COMMAND_LINE:
            place = "command line: "
        elif self.line == ENVIRONMENT:
            place = "environment: "
        what = shown(self.key)
        if self.key and self.value is not None:
            what = f"{what} = {shown(self.value)}"
        return f"{place}{what}: {self.message}" if what else f"{place}{self.message}"


# The "line" of a key that was set on the command line, and of a variable of the environment.
COMMAND_LINE = 0
ENVIRONMENT = -1

SHOWN = 60  # characters of a value
BEFORE = 25  # characters of a long text before what has changed in it


def shown(value: object) -> str:
    """A value as a part of one line, short, with what a terminal would act upon written as escapes."""
    return _short(str(value) if isinstance(value, str | Path) else _literal(value))


def _literal(value: object) -> str:
    """A value as YAML has it, texts in quotes."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case str():
            return repr(value)
        case list():
            return f"[{', '.join(map(_literal, value))}]"
        case dict():
            return f"{{{', '.join(f'{_literal(key)}: {_literal(each)}' for key, each in value.items())}}}"
    return str(value)  # a number, or a date


def shown_change(old: object, new: object) -> tuple[str, str]:
    """Two values of JSON as `shown` shows one; of two long texts that begin alike, what is near to where they differ."""
    if not isinstance(old, str) or not isinstance(new, str):
        return shown(old), shown(new)
    alike = next((at for at, (one, other) in enumerate(zip(old, new, strict=False)) if one != other), min(len(old), len(new)))
    if max(len(old), len(new)) <= SHOWN or alike <= BEFORE:
        return _short(old), _short(new)
    return _short("..." + old[alike - BEFORE :]), _short("..." + new[alike - BEFORE :])


def _short(text: str) -> str:
    text = text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."
    return text if text.isprintable() else "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


class ConfigError(ForeseenError):
    """The config is wrong."""

    code = Exit.CONFIG

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(map(str, problems)))

    def __reduce__(self) -> tuple[type["ConfigError"], tuple[tuple[Problem, ...]]]:
        return type(self), (self.problems,)  # it travels between processes
