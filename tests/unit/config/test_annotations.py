"""What the schema allows at a key, in words; and the key that one of pydantic's findings is of."""

from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from resilient.config import Config
from resilient.config.annotations import allowed, meant, section_of, walk


class Pair(BaseModel):
    first: int
    second: str = Field("", alias="other")


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (int, "a whole number"),
        (Path, "a path"),
        (Literal["a", 2], "a, 2"),
        (int | None, "a whole number or null"),
        (Annotated[float, Field(gt=0, le=1)], "a number, above 0 and at most 1"),
        (Annotated[str, Field(pattern="^a$")] | Literal["auto"], "text, of the form ^a$ or auto"),
        (list[bool], "a list (of true or false)"),
        (list[Any], "a list"),
        (tuple[int, int], "a list of 2 (each a whole number)"),
        (dict[str, int], "a mapping"),
        (Pair, "a mapping with the keys first, other"),
    ],
)
def test_what_is_allowed_is_told_in_words(annotation: Any, words: str):
    assert allowed(annotation) == words


@pytest.mark.parametrize(
    ("annotation", "text", "written"),
    [
        (int, "200", "200"),
        (int | None, "1e3", "1000"),
        (Annotated[int, Field(ge=1)] | Literal["auto"], "2.0", "2"),
        (int, "2.5", None),
        (int, "many", None),
        (int, "1e99", None),
        (float, "1e3", None),  # such a text is taken for a number
        (int | str, "1", None),
        (bool, "true", "true"),
        (bool | float, "false", "false"),
        (bool, "yes please", None),
        (str, "true", None),
    ],
)
def test_a_text_that_looks_like_what_is_allowed_is_told_as_it_is_to_be_written(annotation: Any, text: str, written: str | None):
    assert meant(annotation, text) == written


def test_a_finding_in_a_branch_of_a_union_is_of_the_key_that_was_written():
    key, annotation, field = walk(("train", "steps", "int"))
    assert key == ("train", "steps")
    assert field is Config.model_fields["train"].annotation.model_fields["steps"]
    assert annotation == field.annotation


def test_a_key_of_a_list_is_of_the_section_of_its_entries():
    section = section_of(("checkpoint", "tiers", "1"))
    assert section is not None and "keep_last" in section.model_fields
    assert section_of(("train",)) is Config.model_fields["train"].annotation
    assert section_of(("train", "steps")) is None
    assert section_of(("no", "such")) is None
