"""What a snapshot daemon refuses: messages, reports and connections that are none."""

import socket
import threading
from pathlib import Path

import pytest
from daemon_worker import take, worker
from lone_daemon import PATIENCE_S, TOKEN, LoneDaemon

from checkpoint.errors import DamagedCheckpoint
from checkpoint.framing import encode
from checkpoint.handshake import WORKER_DAEMON, Client, authenticate, daemon_keys
from checkpoint.protocol import Listening, Skipped, Sync, Synced
from checkpoint.shard_reads import ReadReply
from checkpoint.tiers.remote import RemoteShard
from checkpoint.tiers.session import SOCKET
from checkpoint.worker_news import StateCopied

KEY = daemon_keys(TOKEN)[WORKER_DAEMON]


def test_what_is_no_message_is_refused_in_one_line_of_log_and_ends_nothing(base: Path) -> None:
    with LoneDaemon(base) as daemon:
        daemon.write(b"before the settings\n")
        daemon.start()
        daemon.write(b'nonsense\n{"type": "retain", "generation": "one"}\n{"type": "unheard_of"}\n\xff\xfe\n[]\n')
        assert daemon.sync(1) == Synced(generation=1)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as rank:
            for report in (b"nonsense", b'{"type": "state_copied"}', encode(Sync(generation=1)), b""):
                rank.sendto(report, str(daemon.directory / SOCKET))
        assert daemon.sync(1) == Synced(generation=1)
        lines = daemon.log.read_text().splitlines()
        assert len(lines) == 10 and all("refused" in line for line in lines), lines


def test_a_report_for_no_lease_of_no_step_is_dropped(daemon: LoneDaemon) -> None:
    snapshots = worker(daemon, 1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as rank:
        report = StateCopied(generation=1, rank=0, step=5, lease=10**6, stall_s=0.0, wants=(), changed=True, size_bytes=0)
        rank.sendto(encode(report), str(daemon.directory / SOCKET))
        stranger = StateCopied(generation=1, rank=9, step=6, lease=1, stall_s=0.0, wants=(), changed=True, size_bytes=0)
        rank.sendto(encode(stranger), str(daemon.directory / SOCKET))
    assert daemon.wait_for(Skipped).step == 5
    assert take(daemon, snapshots, 7).shard.key.step == 7


def test_a_connection_that_speaks_something_else_is_refused_and_others_are_served(daemon: LoneDaemon) -> None:
    address = daemon.wait_for(Listening).address
    snapshots = worker(daemon, 1)
    held = take(daemon, snapshots, 1)
    host, _, port = address.rpartition(":")
    guess = Client("a guess", WORKER_DAEMON, "", "").opening
    for opening in (b"GET / HTTP/1.1\r\n\r\n", guess, b"nonsense\n", b"x" * (1 << 17)):
        with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as stranger:
            assert_hung_up(stranger, opening)
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as known:
        authenticate(known, KEY, WORKER_DAEMON, timeout_s=PATIENCE_S)
        assert_hung_up(known, b"nonsense\n")
    shard = RemoteShard(address, held.shard.directory, KEY)
    assert shard.manifest.step == 1
    assert shard.documents().keys() == shard.manifest.files.keys()
    shard.close()
    outside = RemoteShard.__new__(RemoteShard)
    with pytest.raises(DamagedCheckpoint, match="not part of any tier"):
        outside.__init__(address, "/etc", KEY)  # type: ignore[misc]
    log = daemon.log.read_text()
    assert "Traceback" not in log and log.count("is refused") == 1 and log.count("refused before its handshake") == 1


def assert_hung_up(stranger: socket.socket, words: bytes) -> None:
    try:
        stranger.sendall(words)
        assert stranger.recv(1) == b""
    except ConnectionError:
        pass  # it was closed while something was still under way


def test_an_answer_that_is_no_message_means_that_the_node_cannot_be_reached() -> None:
    def answer(server: socket.socket) -> None:
        for _ in range(3):
            connection, _ = server.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(b"\x00" * 8 + b"\n")

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answer, args=(server,))
        thread.start()
        with pytest.raises(DamagedCheckpoint, match="not a message"):
            RemoteShard(f"127.0.0.1:{server.getsockname()[1]}", "/ram/step-00000001", KEY)
        thread.join()
    assert ReadReply().size_bytes == 0
