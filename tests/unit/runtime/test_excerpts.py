"""What is told of a text that is too long to be told whole."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient.excerpts import excerpt, head


@pytest.mark.parametrize("shorten", [head, excerpt])
def test_a_text_that_is_not_too_long_is_told_whole(shorten):
    assert shorten("", 0) == ""
    assert shorten("12345", 5) == "12345"


def test_of_a_long_text_the_beginning_is_told():
    assert head("123456", 5) == "12345 ..."


def test_of_a_long_text_the_head_and_the_tail_are_told_and_how_much_is_left_out():
    assert excerpt("a" * 3 + "b" * 12_000 + "c" * 3, 6) == "aaa [... 12,000 characters are left out ...] ccc"


@given(st.text(max_size=50), st.integers(0, 40))
def test_an_excerpt_has_as_many_characters_of_the_text_as_were_asked_for(text: str, most: int):
    first, _, rest = excerpt(text, most).partition(" [... ")
    if len(text) > most:
        last = rest.partition(" ...] ")[2]
        assert text.startswith(first) and text.endswith(last) and len(first) + len(last) == most
    else:
        assert first == text or " [... " in text
