"""Shards that are fetched from other nodes, where those do not answer, or not yet."""

import asyncio
import logging
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lone_daemon import PATIENCE_S, TOKEN, LoneDaemon

from checkpoint import (
    Candidate,
    Holding,
    LocalShard,
    NoReachableCheckpoint,
    NoUsableCheckpoint,
    Snapshots,
    restore,
    restoring,
    save,
    shard_manifest,
)
from checkpoint.daemon.server import Server
from checkpoint.errors import UnreachableCheckpoint
from checkpoint.handshake import WORKER_DAEMON, daemon_keys
from checkpoint.listener import Listener
from checkpoint.protocol import Held, Listening
from checkpoint.tiers import remote
from checkpoint.tiers.remote import RemoteShard

KEY = daemon_keys(TOKEN)[WORKER_DAEMON]


def test_a_node_that_never_answers_holds_nobody_who_no_longer_waits(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(remote, "TIMEOUT_S", 4 * PATIENCE_S)
    cancelled = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as silent, ThreadPoolExecutor() as pool:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        fetched = pool.submit(RemoteShard, address, "/ram/step-00000001", "token", cancelled)
        asked, _ = silent.accept()
        with asked:
            assert asked.recv(1 << 10)
            assert not fetched.done()
            cancelled.set()
            with pytest.raises(UnreachableCheckpoint, match="nobody waits"):
                fetched.result(PATIENCE_S)


@pytest.fixture
def holding(base: Path) -> Iterator[Holding]:
    """A snapshot of step 5, with ones, that a node holds whose address nobody answers at."""
    with LoneDaemon(base) as daemon:
        daemon.start()
        address = daemon.wait_for(Listening).address
        snapshots = Snapshots(daemon.begin(1))
        snapshots.start(weights(1.0))
        snapshots.ready()
        assert snapshots.take(5, weights(1.0), {}, frozenset(["ram"]), wait_s=PATIENCE_S).copied
        directory = daemon.wait_for(Held).shard.directory
        yield Holding(address=address, remote_path=directory, key=KEY)
        snapshots.finish()


def weights(value: float) -> list[LocalShard]:
    return [LocalShard("w", (8, 8), (0, 0), torch.full((8, 8), value), (8, 8))]


def cut_off(holding: Holding) -> tuple[Holding, socket.socket]:
    """The same copy behind a link that is down: an address that refuses, until somebody listens on the socket."""
    link = socket.socket()
    link.bind(("127.0.0.1", 0))
    return Holding(address=f"127.0.0.1:{link.getsockname()[1]}", remote_path=holding.remote_path, key=holding.key), link


class LateServer(Server):
    """Serves the node's shards where nobody has listened until now: the link is up again."""

    def serve(self, link: socket.socket, after_s: float) -> None:
        async def forever() -> None:
            await asyncio.sleep(after_s)
            link.listen()
            link.setblocking(False)
            self._listener = Listener([link], self._keys, self._on_admitted, logging.getLogger())
            await asyncio.sleep(PATIENCE_S)

        threading.Thread(target=asyncio.run, args=(forever(),), daemon=True).start()


def test_a_snapshot_behind_a_link_that_is_down_for_a_moment_is_gone_on_from_all_the_same(holding: Holding, tmp_path: Path):
    save(tmp_path, 3, weights(-1.0), {}, generation=1)
    behind, link = cut_off(holding)
    LateServer([Path(holding.remote_path).parent], daemon_keys(TOKEN)).serve(link, 1.5)
    wanted = weights(0.0)
    rejected: list[tuple[int, str, str]] = []
    found = restore(
        tmp_path, lambda state: wanted, held=[Candidate(5, "ram", holdings=[behind])], on_reject=lambda *each: rejected.append(each)
    )
    assert found is not None and (found.step, rejected) == (5, [])
    assert torch.equal(wanted[0].data, torch.ones(8, 8))


def test_what_another_generation_took_of_the_step_of_a_snapshot_is_no_part_of_it(holding: Holding, tmp_path: Path):
    """It was copied to where the snapshot was, after nodes had said what they hold."""
    rejected: list[tuple[int, str, str]] = []
    wanted = weights(0.0)
    held = [Candidate(5, f"of {each}", holdings=[holding], generation=each) for each in (2, 1)]
    found = restore(tmp_path, lambda state: wanted, held=held, on_reject=lambda *each: rejected.append(each))
    assert found is not None and (found.step, found.tier) == (5, "of 1")
    assert rejected == [(5, "of 2", "nobody holds step 5")]
    assert torch.equal(wanted[0].data, torch.ones(8, 8))


def test_where_nobody_answers_an_older_step_is_taken_and_else_it_is_no_defect(
    holding: Holding, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The run may be started again: nothing is known to be damaged."""
    monkeypatch.setattr(restoring, "PAUSES_S", (0.01, 0.01))
    behind, link = cut_off(holding)
    held = [Candidate(5, "ram", holdings=[behind])]
    with link:
        with pytest.raises(NoReachableCheckpoint, match=r"step 5: .* cannot be fetched: .*refused"):
            restore(tmp_path, lambda state: weights(0.0), held=held)
        save(tmp_path, 3, weights(-1.0), {}, generation=1)
        wanted = weights(0.0)
        found = restore(tmp_path, lambda state: wanted, held=held)
        assert found is not None and found.step == 3
        path = next(each for each in (tmp_path / "step-00000003" / "w").rglob("*") if each.is_file() and each.name != "zarr.json")
        path.write_bytes(b"damaged")
        with pytest.raises(NoReachableCheckpoint, match="step 3: "):
            restore(tmp_path, lambda state: weights(0.0), held=held)
        with pytest.raises(NoUsableCheckpoint):
            restore(tmp_path, lambda state: weights(0.0))


@contextmanager
def nobody_needed() -> Iterator[tuple[Holding, list[socket.socket]]]:
    """A copy at a node that hangs up on everybody, and who has called."""
    callers: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as link:

        def serve() -> None:
            with suppress(OSError):  # it is over
                while True:
                    caller, _ = link.accept()
                    callers.append(caller)
                    caller.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield Holding(address=f"127.0.0.1:{link.getsockname()[1]}", remote_path="/ram/step-00000005", key=KEY), callers
        link.shutdown(socket.SHUT_RDWR)
        thread.join(PATIENCE_S)


def copied(holding: Holding, base: Path) -> Path:
    """The same copy on this node."""
    return Path(shutil.copytree(holding.remote_path, base / "here"))


def test_a_rank_whose_node_has_all_that_it_needs_connects_to_no_other(holding: Holding, tmp_path: Path):
    """Else, after each restart, every rank would connect to every node."""
    wanted = weights(0.0)
    with nobody_needed() as (other, callers):
        held = [Candidate(5, "ram", holdings=[Holding(copied(holding, tmp_path)), other])]
        found = restore(tmp_path / "none", lambda state: wanted, held=held)
    assert found is not None and found.step == 5
    assert torch.equal(wanted[0].data, torch.ones(8, 8))
    assert not callers


def damaged(here: Path) -> None:
    (path,) = (each for each in (here / "w").rglob("*") if each.is_file() and each.name != "zarr.json")
    text = bytearray(path.read_bytes())
    text[len(text) // 2 :] = bytes(len(text) - len(text) // 2)
    path.write_bytes(text)


def lacking(here: Path) -> None:
    held = shard_manifest.read(here)
    (here / shard_manifest.NAME).write_bytes(shard_manifest.encode(replace(held, chunks={})))


def gone(here: Path) -> None:
    shutil.rmtree(here)


@pytest.mark.parametrize("what", [damaged, lacking, gone])
def test_what_a_node_lacks_is_read_from_the_next_one_that_has_it_and_from_no_more(
    what: Callable[[Path], None], holding: Holding, tmp_path: Path
):
    here = copied(holding, tmp_path)
    what(here)
    wanted = weights(0.0)
    rejected: list[tuple[int, str, str]] = []
    with nobody_needed() as (other, callers):
        found = restore(
            tmp_path / "none",
            lambda state: wanted,
            held=[Candidate(5, "ram", holdings=[Holding(here), holding, other])],
            on_reject=lambda *each: rejected.append(each),
        )
    assert found is not None and (found.step, rejected) == (5, [])
    assert torch.equal(wanted[0].data, torch.ones(8, 8))
    assert not callers


def test_what_nobody_has_who_answers_makes_no_snapshot_damaged(holding: Holding, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A copy of which nobody was asked before may be sound."""
    monkeypatch.setattr(restoring, "PAUSES_S", (0.01,))
    here = copied(holding, tmp_path)
    damaged(here)
    behind, link = cut_off(holding)
    with link, pytest.raises(NoReachableCheckpoint, match="refused"):
        restore(tmp_path / "none", lambda state: weights(0.0), held=[Candidate(5, "ram", holdings=[Holding(here), behind])])
    with pytest.raises(NoUsableCheckpoint):
        restore(tmp_path / "none", lambda state: weights(0.0), held=[Candidate(5, "ram", holdings=[Holding(here)])])
