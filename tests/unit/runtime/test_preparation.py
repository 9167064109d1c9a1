"""The preparation: as a forked process, and who runs it."""

from pathlib import Path
from typing import Any

import pytest

from resilient.agent import preparation
from resilient.agent.forkserver import ForkServer
from resilient.control.preparation import Preparation

HOOKS = {
    "good": "def prepare(config, progress):\n    progress('cooking', 1, 2)\n    print('noise')\n",
    "none": "",
    "config": (
        "from resilient.worker import ConfigError, Problem\n"
        "def prepare(config, progress):\n    raise ConfigError([Problem('args', {5}, 'no good')])\n"
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


def words(server: ForkServer, tmp_path: Path, hook: str, function: str = "main") -> list[dict[str, Any]]:
    """All that the agent would tell the driver."""
    ours, its = server.Pipe()
    entrypoint, log = f"hook_{hook}:{function}", tmp_path / "log"
    process = server.Process(target=preparation.run, args=(its, tmp_path / "config.yaml", entrypoint, log), name="prepare")
    process.start()
    its.close()
    told = preparation.Preparation(ours, lambda: process.exitcode, entrypoint, log)
    found = []
    while not told.over:
        if (word := told.receive()) is not None:
            found.append(word)
    told.close()
    return found


@pytest.fixture
def server(hooks: None, fork_server: ForkServer) -> ForkServer:
    return fork_server


def test_a_preparation_tells_its_progress_and_its_end(server: ForkServer, tmp_path: Path):
    assert words(server, tmp_path, "good") == [{"progress": ["cooking", 1, 2]}, {"done": True}]
    assert (tmp_path / "log").read_text() == "noise\n"


def test_a_module_without_one_needs_none(server: ForkServer, tmp_path: Path):
    assert words(server, tmp_path, "none") == [{"done": True}]


def test_a_config_error_of_the_preparation_arrives_as_one(server: ForkServer, tmp_path: Path):
    assert words(server, tmp_path, "config") == [{"problems": [["args", "{5}", "no good"]]}]


@pytest.mark.parametrize(("hook", "text"), [("bug", "ValueError: a bug"), ("dies", "exit code 3")])
def test_a_preparation_that_fails_is_told_with_its_reason(server: ForkServer, tmp_path: Path, hook: str, text: str):
    (told,) = words(server, tmp_path, hook)
    assert text in told["failed"]


def test_the_status_of_one_that_was_killed_may_come_late(server: ForkServer, tmp_path: Path):
    ours, its = server.Pipe()
    its.close()
    statuses = [None, None, -9]
    told = preparation.Preparation(ours, lambda: statuses.pop(0), "toys:count", tmp_path / "log")
    assert told.due(told.readable())
    assert [told.receive(), told.receive()] == [None, None]
    assert told.due(()), "its pipe is closed, so that nothing will be readable"
    assert not told.readable()
    last = told.receive()
    assert last is not None
    assert "toys:count ended with exit code -9" in last["failed"]
    assert told.over


@pytest.mark.parametrize(
    ("hook", "function", "text"), [("broken", "main", "ZeroDivisionError"), ("none", "nothing", "no function 'nothing'")]
)
def test_an_entry_point_that_cannot_be_imported_is_a_config_error(
    server: ForkServer, tmp_path: Path, hook: str, function: str, text: str
):
    ((key, value, problem),) = words(server, tmp_path, hook, function)[0]["problems"]
    assert (key, value) == ("entrypoint", f"hook_{hook}:{function}")
    assert text in problem


def test_the_first_agent_prepares_and_no_other():
    choice = Preparation()
    assert [choice.launched(node) for node in (0, 1, 2)] == [True, False, False]
    assert not any(choice.connected(node) for node in (0, 1, 2))


def test_a_lost_node_is_followed_by_one_that_is_there():
    choice = Preparation()
    choice.launched(0)
    assert choice.lost(1, {0, 2}) is None
    assert choice.lost(0, {2, 1}) == 1
    assert not choice.launched(0)
    assert choice.lost(1, {2}) == 2


def test_where_nobody_is_there_the_next_one_that_comes_prepares():
    choice = Preparation()
    choice.launched(0)
    assert choice.lost(0, ()) is None
    assert choice.connected(1)
    assert not choice.launched(0)
    assert choice.lost(1, ()) is None
    assert choice.launched(0)


def test_once_it_is_done_nobody_prepares_again():
    choice = Preparation()
    choice.launched(0)
    choice.done = True
    assert choice.lost(0, {1}) is None
    assert not choice.launched(0)
    assert not choice.connected(1)
