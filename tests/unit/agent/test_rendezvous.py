"""Joining a store: a refused port, a server that comes late, a generation that is called off; with real sockets and stores."""

import importlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from listening import listeners
from soak import soaked_after
from torch.distributed import TCPStore

from resilient.agent import groups
from resilient.agent.rendezvous import LONGEST_PAUSE_S, CalledOff, DriverRendezvous, join_store, open_store, store_prefix
from resilient.protocol.messages import Start

SECRET = "s3cret"


def refused_port() -> int:
    """A port at which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(generation: int, *, node_rank: int, master_port: int) -> Start:
    return Start(
        generation=generation,
        node_rank=node_rank,
        nodes=2,
        master_addr="127.0.0.1",
        master_port=master_port,
        collective_timeout_s=600.0,
        report_s=0.2,
        mtbf_s=3600.0,
    )


def test_a_refused_port_is_tried_with_jittered_pauses_and_given_up_in_time(monkeypatch: pytest.MonkeyPatch):
    pauses: list[float] = []
    monkeypatch.setattr("tenacity.time", SimpleNamespace(monotonic=lambda: sum(pauses)))  # nothing else takes time
    with pytest.raises(ConnectionRefusedError):
        join_store("127.0.0.1", refused_port(), timeout_s=1.0, pause=pauses.append)
    assert sum(pauses) < 1.0
    assert len(pauses) >= 3
    assert len(set(pauses)) == len(pauses)
    assert all(0 <= seconds <= LONGEST_PAUSE_S for seconds in pauses)


def test_a_store_that_comes_late_is_joined():
    port = refused_port()
    opened: list[TCPStore] = []

    def pause(seconds: float) -> None:
        if not opened:
            opened.append(TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False))
        time.sleep(seconds)

    store = join_store("127.0.0.1", port, timeout_s=120.0, pause=pause)
    store.set("key", "value")
    assert opened[0].get("key") == b"value"
    assert store.timeout.total_seconds() == 60


ONE_CALLER = """
import socket
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
server.accept()
"""


def test_a_server_that_dies_between_the_knock_and_the_store_is_tried_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("resilient.agent.rendezvous.TRY_S", 1.0)
    opened: list[TCPStore] = []
    with subprocess.Popen([sys.executable, "-c", ONE_CALLER], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        port = int(server.stdout.readline())

        def pause(seconds: float) -> None:
            server.wait()
            if not opened:
                opened.append(TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False))
            time.sleep(seconds)

        join_store("127.0.0.1", port, timeout_s=120.0, pause=pause).set("key", "value")
    assert opened[0].get("key") == b"value"


def test_what_ends_the_pause_ends_the_tries():
    def pause(seconds: float) -> None:
        raise CalledOff

    with pytest.raises(CalledOff):
        join_store("127.0.0.1", refused_port(), timeout_s=30.0, pause=pause)


def test_a_generation_that_is_called_off_leads_to_the_next_with_a_new_store(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("resilient.agent.rendezvous.TRY_S", 60.0)
    with_store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    masters = [refused_port(), with_store.port]
    said: list[int] = []

    def ready(port: int) -> Start:
        said.append(port)
        return start(len(said), node_rank=1, master_port=masters[len(said) - 1])

    def pause(seconds: float) -> None:
        raise CalledOff

    rendezvous = DriverRendezvous("test", "127.0.0.1", SECRET, ready, pause, timeout_s=120.0)
    info = rendezvous.next_rendezvous()
    info.store.set("key", "value")
    assert with_store.get(f"{store_prefix(SECRET, 2)}/key") == b"value"
    assert rendezvous.current is not None
    assert rendezvous.current.generation == 2
    assert len(set(said)) == 2


def test_the_node_of_rank_0_serves_its_own_store(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("resilient.agent.rendezvous.TRY_S", 60.0)
    said: list[int] = []

    def ready(port: int) -> Start:
        said.append(port)
        return start(1, node_rank=0, master_port=port)

    info = DriverRendezvous("test", "127.0.0.1", SECRET, ready, time.sleep, timeout_s=60.0).next_rendezvous()
    info.store.set("key", "value")
    assert join_store("127.0.0.1", said[0], timeout_s=60.0).get(f"{store_prefix(SECRET, 1)}/key") == b"value"


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.3", "::1"])
def test_a_store_listens_at_the_nodes_address_alone(address: str):
    store = open_store(address)
    store.set("key", "value")
    assert listeners(os.getpid()) >= {(address, store.port)}
    assert not {(other, store.port) for other in ("0.0.0.0", "::")} & listeners(os.getpid())
    port = store.port
    del store
    assert (address, port) not in listeners(os.getpid())


def test_no_key_of_a_generation_can_be_guessed():
    info = DriverRendezvous("test", "127.0.0.1", SECRET, lambda port: start(1, node_rank=0, master_port=port), time.sleep, 5.0)
    found = info.next_rendezvous()
    found.store.set("key", "value")
    (key,) = TCPStore("127.0.0.1", found.bootstrap_store_info.master_port, is_master=False).list_keys()
    prefix, _, name = key.partition("/")
    assert (len(prefix), name) == (64, "key")
    assert store_prefix(SECRET, 1) not in (store_prefix(SECRET, 2), store_prefix("other", 1), SECRET)


RESETS = """
import socket, struct, sys
from resilient.agent.rendezvous import log_errors_alone, open_store
if sys.argv[1] == "agent":
    log_errors_alone()
store = open_store("127.0.0.1")
for _ in range(1000):
    with socket.create_connection(("127.0.0.1", store.port)) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
store.set("key", "value")
print(store.get("key"))
"""


@pytest.mark.parametrize(("where", "quiet"), soaked_after(1, [("agent", True), ("elsewhere", False)]))
def test_connections_that_are_reset_leave_no_line_in_the_log(where: str, quiet: bool):
    done = subprocess.run([sys.executable, "-c", RESETS, where], check=True, capture_output=True, text=True)
    assert done.stdout == "b'value'\n"
    assert ("remote address" not in done.stderr) == quiet, "torch itself logs one for each: else nothing has to be done about it"


JOINS = """
import os, sys
from datetime import timedelta
import torch.distributed as dist
if len(sys.argv) > 1:
    from resilient.agent.groups import meet_below
    meet_below(sys.argv[1])
dist.init_process_group("gloo", timeout=timedelta(seconds=120))
store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
print(*store.list_keys(), sep=chr(10))
dist.destroy_process_group()
"""


@pytest.mark.parametrize("prefix", soaked_after(1, ["", "s3cret-prefix"]))
def test_groups_that_find_each_other_by_the_environment_keep_their_keys_below_the_prefix_where_there_is_one(prefix: str):
    store = open_store("127.0.0.1")
    torchruns = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    environ = {**os.environ, **torchruns, "RANK": "0", "WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-c", JOINS, *([prefix] if prefix else [])]
    keys = subprocess.run(command, env=environ, check=True, capture_output=True, text=True).stdout.splitlines()
    assert keys and {key.startswith(f"{prefix}/") for key in keys} == {bool(prefix)}


def test_groups_that_find_each_other_by_a_file_have_another_one_in_each_generation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    handlers = importlib.import_module("torch.distributed.rendezvous")._rendezvous_handlers
    stores = []  # a store that is closed takes its file away
    for generation in (1, 2, 3):
        with monkeypatch.context() as patched:
            patched.setitem(handlers, "file", handlers["file"])  # put back afterwards
            groups.meet_in_files_of(generation)
            store, rank, size = next(handlers["file"](f"file://{tmp_path}/store?rank=0&world_size=1"))
        stores.append(store)
        assert (store.add("address of rank 0", 1), rank, size) == (1, 0, 1), "nothing of the one before is there"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["store", "store.2", "store.3"]
