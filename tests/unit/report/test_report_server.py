"""The page of a campaign while it is served: made anew each time, and only for who knows its address."""

import http.client
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from reported import drawn, figures
from runs import made

from resilient import ledger
from resilient.exits import EnvironmentUnusable
from resilient.report import charts
from resilient.report.reading import read
from resilient.report.server import PageServer

ROOT = Path(__file__).parents[3]


@contextmanager
def served(server: PageServer) -> Iterator[PageServer]:
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server
    finally:
        server.close()
        thread.join()


def test_a_browser_that_goes_away_is_no_error(capfd: pytest.CaptureFixture[str]):
    looking, gone, handlers = threading.Event(), threading.Event(), []

    def render() -> bytes:
        handlers.append(threading.current_thread())
        looking.set()
        gone.wait()
        return b"x"

    with served(PageServer(render, fresh_s=0.0)) as server:
        address = urllib.parse.urlsplit(server.address)
        with socket.create_connection((address.hostname, address.port)) as browser:
            browser.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closed by a reset
            browser.sendall(f"GET {address.path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            looking.wait()
        gone.set()
        handlers[0].join()
        assert asked(server.address) == (200, "x")
    assert capfd.readouterr().err == ""


def test_an_error_of_the_command_itself_is_not_hidden(capfd: pytest.CaptureFixture[str]):
    def render() -> bytes:
        raise ZeroDivisionError

    with served(PageServer(render, fresh_s=0.0)) as server, pytest.raises(http.client.RemoteDisconnected):
        asked(server.address)
    assert "ZeroDivisionError" in capfd.readouterr().err


def asked(address: str, **headers: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=120) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_the_served_page_is_made_anew_and_only_for_who_knows_its_address():
    made_: list[int] = []

    def render() -> bytes:
        made_.append(1)
        return b"<p>%d</p>" % len(made_)

    with served(PageServer(render, fresh_s=0.0)) as server:
        assert [asked(server.address)[1] for _ in range(2)] == ["<p>1</p>", "<p>2</p>"]
        root = server.address.rstrip("/").rpartition("/")[0]
        assert [asked(f"{root}/{path}")[0] for path in ("", "favicon.ico", "../etc/passwd")] == [404] * 3
        assert asked(server.address, Host="evil.example.org:80")[0] == 404
    assert len(made_) == 2
    with served(PageServer(render, fresh_s=1e9)) as server:
        assert asked(server.address)[1] == asked(server.address)[1]


def test_a_run_directory_that_goes_away_is_said_and_comes_back():
    gone = [True]

    def render() -> bytes:
        if gone.pop() if gone else False:
            raise EnvironmentUnusable("it is gone")
        return b"there"

    with served(PageServer(render, fresh_s=0.0)) as server:
        with pytest.raises(urllib.error.HTTPError, match="503") as answer:
            urllib.request.urlopen(server.address, timeout=120)
        with answer.value as said:
            assert (said.read(), said.headers["Refresh"]) == (b"it is gone\n", "5")  # a browser asks again by itself
        assert asked(server.address) == (200, "there")


def test_the_command_serves_a_page_that_follows_the_campaign_and_ends_with_ctrl_c(tmp_path: Path):
    run_dir = made(tmp_path / "run", steps=40, faults=1, jobs=1)
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-m", "resilient", "report", run_dir, "--watch"], stdout=subprocess.PIPE, text=True, env=environ
    )
    try:
        assert process.stdout is not None
        address = process.stdout.readline().split()[0]
        text = asked(address)[1]
        assert 'http-equiv="refresh"' in text and figures(drawn(text))["step"][0] == 40
        line = {"step": 41, "loss": 1.0, "step_s": 0.9, "generation": 9, "t": 1.8e9}
        with (run_dir / ledger.METRICS).open("a") as file:
            file.write(f"{json.dumps(line)}\n")
        deadline = time.monotonic() + 120
        while figures(drawn(asked(address)[1]))["step"][0] != 41:
            assert time.monotonic() < deadline, "the page was not made anew"
            time.sleep(0.2)
        process.send_signal(2)
        assert process.wait(timeout=120) == 0
    finally:
        process.kill()
        process.wait()
    assert charts.by_time(read(run_dir))
