"""Shards that are fetched from other nodes, where those do not answer."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from checkpoint.tiers.remote import TIMEOUT_S, RemoteShard, Unreachable


def test_a_node_that_never_answers_holds_nobody_who_no_longer_waits():
    cancelled = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as silent, ThreadPoolExecutor() as pool:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        fetched = pool.submit(RemoteShard, address, "/ram/step-00000001", "token", cancelled)
        asked, _ = silent.accept()
        with asked:
            assert asked.recv(1 << 10)
            assert not fetched.done()
            cancelled.set()
            with pytest.raises(Unreachable, match="nobody waits"):
                fetched.result(TIMEOUT_S / 2)
