"""Options of the whole test suite."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rounds", type=int, default=3, help="how often tests repeat what depends on chance (a soak: --rounds 10 and more)"
    )


@pytest.fixture(scope="session")
def rounds(request: pytest.FixtureRequest) -> int:
    """How often to repeat what depends on chance."""
    return int(request.config.getoption("--rounds"))
