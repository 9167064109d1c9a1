"""What tests of the trainer share."""

from pathlib import Path

import pytest
from trainer_ranks import write_dataset


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokens in which there is something to learn."""
    return write_dataset(tmp_path_factory.mktemp("data") / "walks")
