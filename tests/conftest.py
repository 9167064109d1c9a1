"""Options of the whole test suite."""

import os
import signal

import hypothesis
import pytest

pytest_plugins = ["rewriting", "costs", "soak", "order", "browser", "confirming"]

# Before torch is imported: tests run beside each other, and numbers do not depend on how many processors there are.
os.environ.setdefault("OMP_NUM_THREADS", "1")
pytest.register_assert_rewrite("campaigns", "lab_jobs", "reported")

# How long an example takes says nothing on a machine that is busy with something else.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Started in the background of a shell, which has children ignore it; tests of Ctrl-C send it to commands of their own.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rounds", type=int, default=3, help="how often tests of the second tier repeat what depends on chance")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """What depends on chance is done once in the first tier, and `--rounds` times in the second."""
    if "rounds" in metafunc.fixturenames:
        once = [] if metafunc.definition.get_closest_marker("soak") else [pytest.param(1, id="once")]
        often = pytest.param(metafunc.config.getoption("--rounds"), id="often", marks=pytest.mark.soak)
        metafunc.parametrize("rounds", [*once, often])


def pytest_xdist_auto_num_workers() -> int:
    """Of `-n auto`: more than twice as many as there are processors, for tests wait most of the time."""
    return min(8, 2 * len(os.sched_getaffinity(0)) + 2)
