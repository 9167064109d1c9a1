"""What sections and keys of the config are made of: the base of every section, and the kinds of numbers."""

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def no_bool(value: object) -> object:
    """YAML's `yes` is a boolean, and Python's True is a number; here it is not."""
    if isinstance(value, bool):
        raise ValueError("a boolean is not a number")
    return value


def not_empty(value: object) -> object:
    """An empty path would be the directory where the command runs."""
    if value == "":
        raise ValueError("a path is not empty")
    return value


def off(value: object) -> object:
    """YAML's `off` is the boolean false; where it is a word among others, that is meant."""
    return "off" if value is False else value


Auto = Literal["auto"]
Count = Annotated[int, Field(ge=1, strict=True)]
Length = Annotated[int, Field(ge=1, le=1 << 53, strict=True)]  # of a run: no reader of its files takes a larger number
NonNegative = Annotated[int, Field(ge=0, strict=True)]
Flag = Annotated[bool, Field(strict=True)]
# Not strict: YAML reads 1e-3 as text.
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False), BeforeValidator(no_bool)]
Fraction = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False), BeforeValidator(no_bool)]
Rate = Annotated[float, Field(ge=0, allow_inf_nan=False), BeforeValidator(no_bool)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False), BeforeValidator(no_bool)]


class Section(BaseModel):
    """Base of every section: frozen, and a key that is not declared is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)
