"""How values are shown in one line."""

from string import printable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient.config.errors import SHOWN, shown_change

SCRIPT = "/p/project/" + "deep/" * 12 + "train.py"
TEXT = st.text(st.sampled_from([each for each in printable if each.isprintable()]))


@pytest.mark.parametrize(
    ("old", "new", "shown"),
    [
        (None, 3, ("null", "3")),
        (True, "no", ("true", "no")),
        ("train.py --steps 1000", "train.py --steps 35", ("train.py --steps 1000", "train.py --steps 35")),
        (f"{SCRIPT} --lr 1", f"{SCRIPT} --lr 2", (".../deep/deep/train.py --lr 1", ".../deep/deep/train.py --lr 2")),
        (SCRIPT, "train.py", (SCRIPT[:57] + "...", "train.py")),
        (SCRIPT, f"{SCRIPT}\x1b[2J", ("...p/deep/deep/deep/train.py", "...p/deep/deep/deep/train.py\\x1b[2J")),
    ],
)
def test_a_change_is_shown_short_and_where_it_is(old: object, new: object, shown: tuple[str, str]):
    assert shown_change(old, new) == shown


@given(TEXT, TEXT, TEXT)
def test_texts_that_differ_are_not_shown_alike(alike: str, old: str, new: str):
    one, other = shown_change(alike + old, alike + new)
    assert (one == other) == (old == new)
    assert max(len(one), len(other)) <= SHOWN
