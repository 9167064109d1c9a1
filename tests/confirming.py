"""`--confirm-failures N`: a test that failed beside others is run N times more by itself, and the run fails if one of them does.

On a machine of two cores, campaigns with real processes, links and clocks run six at a time. What fails there and never by itself
is told by name at the end, to be looked into, and does not hold up a change that has nothing to do with it. More than MOST failures
are no accident: nothing is run again.
"""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

MOST = 2
SHOWN = 60  # lines of a test that fails again


def again(root: Path, test: str, times: int) -> str | None:
    """Run one test by itself so many times. Returns: the output of the first that failed; None: each passed."""
    options = ["-n", "0", "-q", "-p", "no:cacheprovider", "-m", "soak or not soak", "--confirm-failures", "0"]
    for _ in range(times):
        command = [sys.executable, "-m", "pytest", *options, test]
        done = subprocess.run(command, check=False, cwd=root, capture_output=True, text=True, errors="replace")
        if done.returncode != 0:
            return done.stdout + done.stderr
    return None


class Confirmation:
    """Looks at what failed, once all tests are through."""

    def __init__(self, times: int) -> None:
        self.times = times
        self.failed: dict[str, None] = {}  # in the order in which they failed
        self.passed_alone: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed[report.nodeid] = None

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Iterator[None]:
        if session.exitstatus == pytest.ExitCode.TESTS_FAILED and 0 < len(self.failed) <= MOST:
            reporter = session.config.pluginmanager.get_plugin("terminalreporter")
            assert reporter is not None
            if self._confirmed(session.config.rootpath, list(self.failed), reporter):
                session.exitstatus = pytest.ExitCode.OK
        return (yield)

    def _confirmed(self, root: Path, tests: Sequence[str], reporter: pytest.TerminalReporter) -> bool:
        """Whether none of them fails by itself."""
        for test in tests:
            reporter.line(f"\nfailed, and is run {self.times} times by itself: {test}")
            output = again(root, test, self.times)
            if output is not None:
                reporter.line("\n".join(output.splitlines()[-SHOWN:]))
                return False
            self.passed_alone.append(test)
        return True

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for test in self.passed_alone:
            found = f"failed beside other tests and passed {self.times} of {self.times} by itself"
            terminalreporter.line(f"FLAKY {test} {found}", yellow=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--confirm-failures", type=int, default=0, metavar="N", help=f"run up to {MOST} failed tests N times more, each by itself"
    )


def pytest_configure(config: pytest.Config) -> None:
    times = config.getoption("--confirm-failures")
    if times and not hasattr(config, "workerinput"):  # not in a worker of xdist
        config.pluginmanager.register(Confirmation(times))
