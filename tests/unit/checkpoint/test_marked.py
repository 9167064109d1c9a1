"""Whether the directory of a durable tier is there, and is the one that was meant."""

from pathlib import Path

import pytest

from checkpoint.marked import must_be_there


@pytest.mark.parametrize(
    "text", ["0123456789ab\n", "0123456789ab", "", "\0\0"]
)  # the last two as a crash of its file system leaves it
def test_a_directory_with_its_mark_is_there(text: str, tmp_path: Path):
    (tmp_path / ".identity").write_text(text)
    must_be_there(tmp_path, ".identity", "0123456789ab")


@pytest.mark.parametrize("root", ["away", "file", "."])
def test_without_a_mark_it_may_not_be_mounted(root: str, tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(FileNotFoundError, match=r"not there any more.*mounted"):
        must_be_there(tmp_path / root, ".identity", "0123456789ab")


def test_a_directory_of_another_campaign_is_not_the_one_that_was_meant(tmp_path: Path):
    (tmp_path / ".identity").write_text("ba9876543210\n")
    with pytest.raises(FileNotFoundError, match="leads to another directory"):
        must_be_there(tmp_path, ".identity", "0123456789ab")
