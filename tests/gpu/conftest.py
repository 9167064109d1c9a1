"""Tests that need a GPU. Where there is none they are skipped, and the summary says so."""

import sys
from pathlib import Path

import pytest

_TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(_TESTS / folder) for folder in ("unit/trainer", "unit/checkpoint", "integration")]

from campaigns import campaign  # noqa: E402, F401 - a fixture


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if "tests/gpu" in str(item.path):
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU, and there is none here"))
