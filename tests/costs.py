"""What each test costs: wall time, and processor time with that of the processes that it started.

At the end of a run the dearest tests are printed. A test of the first tier (one without the mark `soak`) that took more processor
time than the limit is named in a warning; one that took more than MARGIN times the limit fails the run. Between the two lies what
the same test takes from one run to the next: hardware threads that share a core, caches and clocks make up that much. A fixture of
a wider scope than one test is computed once and shared: its cost is not charged to the test that happens to be first, it is listed
by its own name under the same limit.

The limit is meant for one speed of processor. A core that is slower takes more processor time for the same work, as does one whose
execution units another hardware thread shares. While tests run, a thread times a fixed piece of work now and then; after a test
above the limit it is timed again, and so is the start of a process that imports torch, of which campaigns' costs mostly consist.
The limit grows with what is slowest.

Processor time is counted over the test process, its living descendants, and those that were waited for. What a killed parent
left to init is not in it.
"""

import functools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest

LIMIT_S = 20.0  # processor time of a test of the first tier, where `_work` takes WORK_S and `_start` START_S
WORK_S = 0.045
START_S = 2.3
MARGIN = 1.5
LOOK_S = 30.0  # between two samples of the processor's speed
SHOWN = 20
KEY = "costs"
LIMIT_MARK = "cost_limit_s"
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Cost:
    """Seconds that a test or a shared fixture took.

    Attributes:
        slowness: of the processor, at least 1; measured above the limit only.
        limit_s: of its own; None: that of all.
    """

    name: str
    wall_s: float
    cpu_s: float
    soak: bool = False
    shared: bool = False
    slowness: float = 1.0
    limit_s: float | None = None

    def allowed_s(self, limit_s: float) -> float:
        """What it may take on this processor. Args: limit_s: of all tests."""
        return (limit_s if self.limit_s is None else self.limit_s) * self.slowness


def over(costs: list[Cost], limit_s: float, times: float = 1.0) -> list[Cost]:
    """Those of the first tier that took more than `times` what they may. Args: limit_s: on a processor that it is meant for."""
    return [cost for cost in costs if not cost.soak and cost.cpu_s > times * cost.allowed_s(limit_s)]


def table(costs: list[Cost], shown: int = SHOWN) -> list[str]:
    """The dearest `shown` by processor time, a line each."""
    dearest = sorted(costs, key=lambda cost: -cost.cpu_s)[:shown]
    return [f"{cost.cpu_s:7.1f} s {cost.wall_s:7.1f} s  {cost.name}{' (shared)' * cost.shared}" for cost in dearest]


# -- measuring, in the process that runs the tests ---------------------------------------------------------------------------


def _descendants() -> Iterator[int]:
    """Process ids of all that descend from this process, as far as the kernel lists them."""
    left = [os.getpid()]
    while left:
        for thread in _threads(left.pop()):
            try:
                found = [int(word) for word in (thread / "children").read_text().split()]
            except OSError:
                continue  # ended meanwhile
            yield from found
            left += found


def _threads(pid: int) -> list[Path]:
    """The directories of a process's threads; none where it has ended, which it may do while they are listed."""
    try:
        return list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return []


def cpu_s() -> float:
    """Processor time used so far by this process and its descendants, those included that they waited for."""
    own = os.times()
    total = own.user + own.system + own.children_user + own.children_system
    for pid in _descendants():
        try:
            fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        total += sum(map(int, fields[11:15])) / _TICKS_PER_S  # utime, stime, cutime, cstime: proc(5)
    return total


def _work() -> None:
    numbers = {number: str(number) for number in range(150_000)}
    sorted(numbers.values())


def _start() -> None:
    subprocess.run([sys.executable, "-c", "import torch"], check=True, capture_output=True)


class Pace:
    """How long the fixed piece of work takes while others work, in shares of WORK_S."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, float]] = []  # when it began (monotonic), and what it took

    def watch(self) -> None:
        """Take samples, in a thread of its own, as long as this process lives."""
        threading.Thread(target=self._look, name="pace", daemon=True).start()

    def _look(self) -> None:
        while True:
            time.sleep(LOOK_S)
            self.sample()

    def sample(self) -> None:
        self._samples.append((time.monotonic(), _timed(_work, time.thread_time) / WORK_S))

    def since(self, began: float) -> float:
        """The median of the samples since then; 1 if there is none."""
        return median([share for t, share in self._samples if t >= began] or [1.0])


def slowness() -> float:
    """How much longer than on a processor of the limit's speed work takes now, at least 1: the slower of two pieces."""
    computing = median(_timed(_work, time.thread_time) for _ in range(5)) / WORK_S
    return max(1.0, computing, _starting())


@functools.cache
def _starting() -> float:
    return _timed(_start, _of_children) / START_S


def _timed(work: Callable[[], None], clock: Callable[[], float]) -> float:
    began = clock()
    work()
    return clock() - began


def _of_children() -> float:
    own = os.times()
    return own.children_user + own.children_system


class Meter:
    """Times what runs, and takes what is shared out of what it happens in."""

    def __init__(self) -> None:
        self._shared_wall_s = 0.0
        self._shared_cpu_s = 0.0
        self.shared: list[Cost] = []  # since they were last taken

    def mark(self) -> tuple[float, float]:
        return time.monotonic() - self._shared_wall_s, cpu_s() - self._shared_cpu_s

    def since(self, mark: tuple[float, float]) -> tuple[float, float]:
        """Wall and processor time since `mark`, without what was shared."""
        wall_s, used_s = self.mark()
        # A descendant that was killed and not waited for takes its time with it.
        return wall_s - mark[0], max(0.0, used_s - mark[1])

    @contextmanager
    def sharing(self, name: str, *, soak: bool = False) -> Iterator[None]:
        """What is computed inside is a cost of its own."""
        mark = self.mark()
        try:
            yield
        finally:
            wall_s, used_s = self.since(mark)
            self._shared_wall_s += wall_s
            self._shared_cpu_s += used_s
            self.shared.append(Cost(name, wall_s, used_s, soak, shared=True))

    def take(self) -> list[Cost]:
        taken, self.shared = self.shared, []
        return taken


METER = Meter()
PACE = Pace()
_MARK = pytest.StashKey[tuple[float, float]]()
_BEGAN = pytest.StashKey[float]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[Any]:
    item.stash[_MARK], item.stash[_BEGAN] = METER.mark(), time.monotonic()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> Iterator[Any]:
    if fixturedef.scope == "function":
        return (yield)
    with METER.sharing(f"{fixturedef.baseid}::{fixturedef.argname}"):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[Any]:
    report = yield
    if call.when == "teardown":
        soak = item.get_closest_marker("soak") is not None
        mark = item.get_closest_marker(LIMIT_MARK)
        own = Cost(item.nodeid, *METER.since(item.stash[_MARK]), soak, limit_s=None if mark is None else float(mark.args[0]))
        taken = [own, *METER.take()]
        if over(taken, item.config.getoption("--cost-limit-s")):
            factor = max(slowness(), PACE.since(item.stash[_BEGAN]))
            taken = [replace(cost, slowness=factor) for cost in taken]
        report.user_properties.append((KEY, [asdict(cost) for cost in taken]))
    return report


# -- telling, in the process that a person started (with xdist, another one) -------------------------------------------------


class Register:
    """Collects what the reports carry; prints it, and fails the run where something is too dear."""

    def __init__(self, limit_s: float, file: Path | None) -> None:
        self.limit_s = limit_s
        self.file = file
        self.costs: list[Cost] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for key, values in report.user_properties:
            if key == KEY and report.when == "teardown":
                self.costs += [Cost(**value) for value in values]  # type: ignore[attr-defined]

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.file:
            self.file.write_text("".join(f"{json.dumps(asdict(cost))}\n" for cost in self.costs))
        if over(self.costs, self.limit_s, MARGIN) and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.costs:
            return
        tests = [cost for cost in self.costs if not cost.shared]
        whole_s = sum(cost.cpu_s for cost in self.costs)
        terminalreporter.section(f"processor time, wall time: the dearest {min(SHOWN, len(self.costs))} of {len(tests)} tests")
        for line in table(self.costs):
            terminalreporter.line(line)
        terminalreporter.line(f"{whole_s:7.1f} s of processor time in all")
        failing = over(self.costs, self.limit_s, MARGIN)
        for cost in over(self.costs, self.limit_s):
            allowed = f"{cost.allowed_s(self.limit_s):.3g} s"
            if cost.slowness > 1:
                allowed += f" on a processor as slow as this one was then ({cost.slowness:.2f} times the time for the same work)"
            fails = cost in failing
            terminalreporter.line(
                f"{'FAILED' if fails else 'WARNING'} {cost.name} took {cost.cpu_s:.1f} s of processor time; the first tier allows"
                f" {allowed}: make it cheaper, or mark what repeats as soak"
                + f" (above {MARGIN} times that it fails the run)"
                * (not fails),
                red=fails,
                yellow=not fails,
            )


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cost-limit-s",
        type=float,
        default=LIMIT_S,
        help="processor time that a test of the first tier without a mark of its own may take",
    )
    parser.addoption("--costs-to", type=Path, help="write what each test cost to this file, a JSON object a line")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"{LIMIT_MARK}(seconds): the processor time that the test may take, if not that of all")
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        PACE.watch()
    if not hasattr(config, "workerinput"):  # not a worker of xdist
        config.pluginmanager.register(Register(config.getoption("--cost-limit-s"), config.getoption("--costs-to")))
