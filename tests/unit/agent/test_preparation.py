"""The preparation: as a forked process, and as the agent that runs it sees it."""

from multiprocessing.connection import wait
from pathlib import Path

import pytest

from resilient.agent import preparation
from resilient.agent.forkserver import ForkServer
from resilient.exits import Exit
from resilient.protocol.messages import PreparationEnded, PreparationProgress

HOOKS = {
    "good": "def prepare(config, progress):\n    progress('cooking', 1, 2)\n    print('noise')\n",
    "none": "",
    "config": (
        "from resilient.worker import ConfigError, Problem\n"
        "def prepare(config, progress):\n    raise ConfigError([Problem('args', {5}, 'no good')])\n"
    ),
    "no_room": (
        "from resilient.worker import EnvironmentUnusable\n"
        "def prepare(config, progress):\n    raise EnvironmentUnusable('data.text: no room')\n"
    ),
    "bug": "def prepare(config, progress):\n    raise ValueError('a bug')\n",
    "dies": "import os\ndef prepare(config, progress):\n    os._exit(3)\n",
    "broken": "1 / 0\n",
}

MAIN = "\ndef main(config):\n    pass\n"


@pytest.fixture(autouse=True)
def hooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules with entry points, where a fork server that is started later finds them."""
    for name, text in HOOKS.items():
        (tmp_path / f"hook_{name}.py").write_text(text + (MAIN if name != "broken" else ""))
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "config.yaml").write_text("")


def news_of(server: ForkServer, tmp_path: Path, hook: str, function: str = "main") -> list[preparation.News]:
    """All that the agent would pass on to the driver."""
    ours, its = server.Pipe()
    entrypoint, log = f"hook_{hook}:{function}", tmp_path / "log"
    process = server.Process(target=preparation.run, args=(its, tmp_path / "config.yaml", entrypoint, log), name="prepare")
    process.start()
    its.close()
    running = preparation.Preparation(ours, lambda: process.exitcode, entrypoint, log)
    found = []
    while not running.over:
        wait(running.readable(), 1.0)
        if (news := running.receive()) is not None:
            found.append(news)
    running.close()
    process.join(60.0)  # what it has printed is in its log then
    return found


@pytest.fixture
def server(hooks: None, fork_server: ForkServer) -> ForkServer:
    return fork_server


def test_a_preparation_reports_its_progress_and_its_end(server: ForkServer, tmp_path: Path):
    progress = PreparationProgress(generation=0, what="cooking", done=1, total=2)
    assert news_of(server, tmp_path, "good") == [progress, PreparationEnded(generation=0)]
    assert (tmp_path / "log").read_text() == "noise\n"


def test_a_module_without_one_needs_none(server: ForkServer, tmp_path: Path):
    assert news_of(server, tmp_path, "none") == [PreparationEnded(generation=0)]


def test_a_config_error_of_the_preparation_arrives_as_one(server: ForkServer, tmp_path: Path):
    assert news_of(server, tmp_path, "config") == [PreparationEnded(generation=0, problems=(("args", "{5}", "no good"),))]


def test_a_place_that_cannot_be_used_is_told_in_a_line_with_its_exit_code(server: ForkServer, tmp_path: Path):
    unusable = PreparationEnded(generation=0, failure="data.text: no room", code=Exit.UNUSABLE)
    assert news_of(server, tmp_path, "no_room") == [unusable]


@pytest.mark.parametrize(("hook", "text"), [("bug", "ValueError: a bug"), ("dies", "exit code 3")])
def test_a_preparation_that_fails_is_reported_with_its_reason(server: ForkServer, tmp_path: Path, hook: str, text: str):
    (ended,) = news_of(server, tmp_path, hook)
    assert isinstance(ended, PreparationEnded) and ended.failure is not None
    assert text in ended.failure
    assert not ended.killed, "another attempt would fail likewise"


def test_the_status_of_one_that_was_killed_may_come_late(server: ForkServer, tmp_path: Path):
    ours, its = server.Pipe()
    its.close()
    statuses = [None, None, -9]
    running = preparation.Preparation(ours, lambda: statuses.pop(0), "toys:count", tmp_path / "log")
    assert running.due(running.readable())
    assert [running.receive(), running.receive()] == [None, None]
    assert running.due(()), "its pipe is closed, so that nothing will be readable"
    assert not running.readable()
    last = running.receive()
    assert isinstance(last, PreparationEnded) and last.failure is not None
    assert "toys:count ended with exit code -9" in last.failure
    assert last.killed
    assert running.over


def test_a_preparation_is_made_where_the_driver_wants_it_as_soon_as_there_is_a_fork_server(server: ForkServer, tmp_path: Path):
    sent: list[preparation.News] = []
    here = preparation.Preparations(
        server,
        config=tmp_path / "config.yaml",
        entrypoint="hook_good:main",
        log=tmp_path / "log",
        send=sent.append,
        outcome=None,
    )
    here.want()
    here.step(())
    assert not sent and not here.readable(), "nothing has been heard of a server yet"
    while not server.ready:
        wait([server.fileno()])
        server.receive()
    here.step(())
    while not any(isinstance(news, PreparationEnded) for news in sent):
        here.step(wait(here.readable(), 1.0))
    assert [type(news) for news in sent] == [PreparationProgress, PreparationEnded]
    here.step(())
    assert not here.readable()


@pytest.mark.parametrize(
    ("hook", "function", "text"), [("broken", "main", "ZeroDivisionError"), ("none", "nothing", "no function 'nothing'")]
)
def test_an_entry_point_that_cannot_be_imported_is_a_config_error(
    server: ForkServer, tmp_path: Path, hook: str, function: str, text: str
):
    (ended,) = news_of(server, tmp_path, hook, function)
    assert isinstance(ended, PreparationEnded)
    ((key, value, problem),) = ended.problems
    assert (key, value) == ("entrypoint", f"hook_{hook}:{function}")
    assert text in problem
