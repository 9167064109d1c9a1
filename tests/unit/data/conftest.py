"""What tests of datasets share."""

from pathlib import Path

import pytest
from datasets_of_text import PROSE, put


@pytest.fixture
def words(tmp_path: Path) -> Path:
    return put(tmp_path / "words.txt", PROSE * 20)
