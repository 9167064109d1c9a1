"""The snapshot daemon as the agent's child; the daemon is a stand-in that speaks the protocol."""

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from parts import PATIENCE_S, Talk

from checkpoint.handshake import DAEMON_DAEMON, WORKER_DAEMON
from checkpoint.protocol import Clear, Inventory, Listening, SnapshotKey, Sync, Synced, TakeInventory
from checkpoint.tiers import session
from resilient import storage
from resilient.agent import daemon as daemon_module
from resilient.agent.daemon import DaemonProcess, as_entry
from resilient.agent.logs import NodeOutput
from resilient.config import Config
from resilient.protocol.candidates import Candidate, Holder, pack
from resilient.protocol.messages import Alive, Ping, Start

FAKE = Path(__file__).with_name("fake_daemon.py")
KEY = SnapshotKey(5, 2)


def start(**more: object) -> Start:
    fields: dict[str, object] = {
        "generation": 3,
        "node_rank": 1,
        "nodes": 2,
        "master_addr": "a",
        "master_port": 1,
        "collective_timeout_s": 600.0,
        "report_s": 0.2,
        "mtbf_s": 3600.0,
        "world_size": 8,
        "first_rank": 4,
        "devices": (0, 1, 2, 3),
    }
    return Start(**{**fields, **more})  # type: ignore[arg-type]


class Setting:
    """A daemon of a kind, in a loop with a driver."""

    def __init__(self, how: str, tmp_path: Path, pass_on: Callable[[int], None] | None = None) -> None:
        self.talk, self.news, self.log = Talk(), [], tmp_path / "requests"
        tiers = [{"name": "ram", "path": "/dev/shm/me"}, {"name": "scratch", "path": str(tmp_path)}]
        config = Config.model_validate({"name": "gpt", "checkpoint": {"every_steps": 50, "tiers": tiers}})
        arranged = storage.arrange(config, 2, "id", {Path("/dev/shm/me"): True, tmp_path: False})
        storage.write(tmp_path, arranged)
        self.daemon = DaemonProcess(
            self.talk.loop,
            storage.read(tmp_path),
            tmp_path / "daemon",
            run_dir=tmp_path / "run",
            node=1,
            host="127.0.0.1",
            keys={DAEMON_DAEMON: "daemons", WORKER_DAEMON: "workers"},
            on_news=self.news.extend,
            pass_on=pass_on,
            command=[sys.executable, str(FAKE), how, str(self.log)],
        )

    def wait_for(self, condition) -> None:  # type: ignore[no-untyped-def]
        assert self.talk.loop.wait_until(condition, PATIENCE_S, poll_s=0.01)

    def requests(self) -> list[str]:
        return [line.strip() for line in self.log.read_text().splitlines()]

    def close(self) -> None:
        self.daemon.close()
        self.talk.close()


@pytest.fixture
def setting(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Setting]:
    made = Setting(request.param, tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("setting", ["answers"], indirect=True)
def test_an_inventory_that_was_asked_for_is_the_answer_and_all_else_is_news(setting: Setting):
    setting.daemon.ask_inventory()
    setting.wait_for(lambda: setting.daemon.inventory is not None)
    setting.daemon.send(TakeInventory(generation=1))
    setting.daemon.send(Sync(generation=1))
    setting.daemon.send(Clear(generation=1, tiers=("ram",)))
    setting.wait_for(lambda: setting.daemon.cleared)
    assert [type(each) for each in setting.news] == [Listening, Inventory, Synced]
    assert setting.requests()[0] == "DaemonSettings", "settings come first"


@pytest.mark.parametrize("setting", ["mute"], indirect=True)
def test_a_daemon_that_never_answers_an_inventory_does_not_keep_pings_waiting(setting: Setting):
    setting.daemon.ask_inventory()
    setting.wait_for(lambda: len(setting.requests() if setting.log.exists() else []) == 2)
    setting.talk.peer.send(Ping(generation=0))
    assert not setting.talk.loop.wait_until(lambda: setting.daemon.inventory is not None, 0.5)
    assert setting.talk.peer.next() == Alive(generation=0)


@pytest.mark.parametrize("setting", ["mute"], indirect=True)
def test_a_daemon_that_owes_an_inventory_for_too_long_is_replaced_before_the_session_begins(setting: Setting):
    setting.daemon.ask_inventory()
    setting.wait_for(lambda: len(setting.requests() if setting.log.exists() else []) == 2)
    setting.daemon.ask_no_more()
    setting.wait_for(lambda: setting.requests()[2:] == ["DaemonSettings", "TakeInventory"])
    setting.daemon.begin(start(), renew=False)
    setting.daemon.send(Sync(generation=3))
    setting.wait_for(lambda: any(isinstance(each, Synced) for each in setting.news))
    assert setting.requests()[4:] == ["BeginSession False", "Sync"]


@pytest.mark.parametrize("setting", ["answers"], indirect=True)
def test_a_daemon_that_has_given_its_inventory_stays(setting: Setting):
    setting.daemon.ask_inventory()
    setting.wait_for(lambda: setting.daemon.inventory is not None)
    setting.daemon.ask_no_more()
    setting.daemon.send(Sync(generation=0))
    setting.wait_for(lambda: any(isinstance(each, Synced) for each in setting.news))
    assert setting.requests().count("DaemonSettings") == 1


@pytest.mark.parametrize("setting", ["dies"], indirect=True)
def test_a_daemon_that_dies_is_followed_by_another_that_takes_an_inventory_and_the_session(setting: Setting):
    setting.daemon.begin(start(), renew=True)
    setting.daemon.ask_inventory()
    setting.wait_for(lambda: setting.daemon.inventory is not None)
    setting.daemon.send(Sync(generation=3))
    setting.wait_for(lambda: any(isinstance(each, Synced) for each in setting.news))
    assert setting.requests() == [
        *["DaemonSettings", "BeginSession True", "TakeInventory"],
        *["DaemonSettings", "TakeInventory", "BeginSession True", "Sync"],
    ], "the first one may have died before it came to renew its buffers"


@pytest.mark.parametrize("setting", ["nonsense"], indirect=True)
def test_a_daemon_that_says_what_is_no_message_is_refused_in_one_line_of_log_and_replaced_until_it_is_given_up(
    setting: Setting, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(daemon_module, "MOST_STARTS", 3)
    setting.daemon.ask_inventory()
    with caplog.at_level(logging.INFO):
        setting.wait_for(lambda: not setting.daemon.running)
    said = [record.getMessage() for record in caplog.records]
    assert [("not a message" in line, "\n" in line) for line in said] == [(True, False)] * 3 + [(False, False)]
    setting.daemon.send(Sync(generation=1))  # nobody is there, and nobody minds


@pytest.mark.parametrize("setting", ["deaf"], indirect=True)
def test_a_daemon_that_does_not_read_keeps_nobody_waiting_and_is_replaced_in_the_end(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(daemon_module, "QUEUE_BYTES", 1 << 20)
    first = setting.daemon._process
    while setting.daemon._process is first:
        setting.daemon.send(Clear(generation=1, tiers=("t" * 10_000,)))
        setting.talk.loop.turn(0.0)
    assert first is not None and first.poll() is not None
    assert setting.daemon.running


@pytest.mark.parametrize("setting", ["deaf"], indirect=True)
def test_a_daemon_that_does_not_end_is_killed(setting: Setting, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(daemon_module, "DAEMON_END_S", 0.2)
    process = setting.daemon._process
    assert process is not None
    setting.daemon.close()
    deadline = time.monotonic() + PATIENCE_S
    while process.poll() is None:
        assert time.monotonic() < deadline
    assert not setting.daemon.running


def test_a_daemon_whose_words_stand_in_a_log_that_takes_nothing_answers(tmp_path: Path):
    log = tmp_path / "agent0.log"
    os.mkfifo(log)
    unread = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    with NodeOutput() as output, closing(Setting("talks", tmp_path, lambda fd: output.pass_on(fd, log))) as setting:
        setting.daemon.ask_inventory()
        setting.wait_for(lambda: setting.daemon.inventory is not None)
        assert setting.requests() == ["DaemonSettings", "TakeInventory"]
    assert os.read(unread, 1 << 20).startswith(b"xxx")
    os.close(unread)


def test_the_last_words_of_daemons_that_die_at_their_start_are_in_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(daemon_module, "MOST_STARTS", 3)
    log, descriptors = tmp_path / "agent0.log", psutil.Process().num_fds()
    with NodeOutput() as output, closing(Setting("fails", tmp_path, lambda fd: output.pass_on(fd, log))) as setting:
        setting.wait_for(lambda: not setting.daemon.running)
    assert log.read_text().count("\nMemoryError: as it was told to\n") == 3
    assert psutil.Process().num_fds() == descriptors + 1, "one stays for threads that wake the loop"


@pytest.mark.parametrize("setting", ["answers"], indirect=True)
@pytest.mark.parametrize("begins", [False, True], ids=["before a generation", "in one"])
def test_the_directory_of_a_daemon_that_ends_is_left_only_where_a_generation_has_begun(setting: Setting, begins: bool):
    if begins:
        setting.daemon.begin(start(), renew=False)
    setting.daemon.close()
    assert (setting.log.parent / "daemon").exists() == begins


@pytest.mark.parametrize("setting", ["answers"], indirect=True)
def test_whose_a_daemon_is_stands_in_its_environment(setting: Setting):
    assert setting.daemon._process is not None
    assert f"RESILIENT_RUN_DIR={setting.log.parent / 'run'}".encode() in Path(
        f"/proc/{setting.daemon._process.pid}/environ"
    ).read_bytes().split(b"\0")


@pytest.mark.parametrize("setting", ["answers"], indirect=True)
def test_workers_read_where_the_shards_are(setting: Setting):
    candidate = Candidate(key=KEY, tier="ram", shards=((Holder(0, "n0:1", "/a"), Holder(1, "n1:1", "/b")),))
    setting.daemon.begin(start(candidates=pack([candidate]), durable_step=4), renew=False)
    found = session.read(setting.daemon.session_path)
    assert (found.node, found.nodes, found.generation, found.first_rank, found.ranks, found.mtbf_s) == (1, 2, 3, 4, 4, 3600.0)
    assert found.durable_step == 4
    (read,) = found.candidates
    assert (read.step, read.generation, read.tier) == (5, KEY.generation, "ram")
    assert [(each.directory, each.address, each.remote_path, each.key) for each in read.holdings] == [
        (Path("/b"), None, "", ""),
        (None, "n0:1", "/a", "workers"),
    ]


@pytest.mark.parametrize("setting", ["answers"], indirect=True)
def test_candidates_that_are_none_are_refused(setting: Setting):
    with pytest.raises(ValueError, match="not a list of candidates"):
        setting.daemon.begin(start(candidates=b"nonsense"), renew=False)


def test_what_a_node_holds_itself_comes_first_and_a_node_without_an_address_is_left_out():
    shards = (
        (Holder(0, "n0:1", "/a"), Holder(1, "n1:1", "/b")),
        (Holder(1, "n1:1", "/c"), Holder(2, "", "/d"), Holder(0, "n0:1", "/e")),
    )
    entry = as_entry(Candidate(key=KEY, tier="nvme", shards=shards), 1, "t", (0, 3))
    assert json.loads(json.dumps(entry)) == {
        "step": 5,
        "generation": KEY.generation,
        "tier": "nvme",
        "holdings": [
            {"directory": "/b"},
            {"directory": "/c"},
            {"address": "n0:1", "path": "/a", "key": "t"},
            {"address": "n0:1", "path": "/e", "key": "t"},
        ],
    }


@pytest.mark.parametrize(
    ("shards", "place", "order"),
    [
        (4, (2, 4), [2, 1, 3, 0]),
        (4, (0, 4), [0, 1, 2, 3]),
        (2, (5, 6), [1, 0]),  # with hybrid sharding, where it is of the third group
        (4, (2, 3), [2, 1, 3, 0]),  # of what four nodes have taken three need one and a third each
        (3, (3, 4), [2, 1, 0]),
    ],
)
def test_the_shard_that_a_node_needs_comes_before_those_that_are_further_off(shards: int, place: tuple[int, int], order: list[int]):
    """Were it the first for all, every rank would ask every node in a row until it has come to its own."""
    held = tuple((Holder(90 + shard, f"n{shard}:1", f"/{shard}"),) for shard in range(shards))
    entry = as_entry(Candidate(key=KEY, tier="ram", shards=held), 7, "t", place)
    assert [int(each["path"].removeprefix("/")) for each in entry["holdings"]] == order
