"""`resilient report`: reads a run directory, and writes its page or serves it on a loopback port."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from urllib.parse import quote

from resilient.driver.display import size
from resilient.exits import EnvironmentUnusable
from resilient.ledger import EVENTS, METRICS, parts
from resilient.lifeline import die_with_parent
from resilient.redaction import hidden_config
from resilient.report.html import Subject, listed, page
from resilient.report.markdown import markdown
from resilient.report.past import Fault, Past
from resilient.report.reading import read
from resilient.report.server import HOST, PageServer
from resilient.status import Summary, inspect

FILE = "report.html"
LONGEST_ID = 100  # of a fault; a damaged ledger may have one that no file can be called
CONFIG_BYTES = 256 << 10
LARGE_BYTES = 32 << 20  # of ledger and metrics
EVERY_S = 5.0  # between two looks at a campaign whose page is served


def gather(run_dir: Path, *, links_from: Path | None, every_s: float | None = None) -> Subject:
    """All that the report tells.

    Args:
        links_from: the folder of the page; None: nothing can be linked to.
        every_s: as of `Subject`.

    Raises:
        EnvironmentUnusable: it is no run directory, or cannot be read.
    """
    try:
        summary, past = _read(run_dir)
        stacks = {} if links_from is None else _stacks(run_dir, links_from, listed(past))
        return Subject(str(run_dir.absolute()), summary, past, time.time(), stacks, _config(run_dir), every_s)
    except OSError as error:
        raise EnvironmentUnusable(f"{error.filename or run_dir} cannot be read: {error.strerror or error}") from None


def _read(run_dir: Path) -> tuple[Summary, Past]:
    """What `status` tells and what the page has besides; of large files by two processes at once."""
    sizes = [part.stat().st_size for name in (EVENTS, METRICS) for part in parts(run_dir / name) if part.exists()]
    if sum(sizes) < LARGE_BYTES:
        return inspect(run_dir), read(run_dir)
    with ProcessPoolExecutor(1, get_context("fork"), _begin, (os.getpid(),)) as beside:
        summary = beside.submit(inspect, run_dir)
        past = read(run_dir)
        try:
            return summary.result(), past
        except BrokenProcessPool:  # it was killed
            return inspect(run_dir), past


def _begin(parent: int) -> None:
    """In the process beside this one: it ends with it, and by Ctrl-C without a word."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    die_with_parent(parent)


def _stacks(run_dir: Path, folder: Path, faults: Sequence[Fault]) -> dict[str, str]:
    """Links to what ranks were doing, for faults of which that was saved."""
    found = {}
    for name in {each.fault_id for each in faults}:
        plain = len(name) <= LONGEST_ID and name.replace("-", "").isalnum()
        for path in (run_dir / "incidents" / name, run_dir / "incidents" / f"{name}.tar.zst") if plain else ():
            if path.exists():
                found[name] = quote(os.path.relpath(path.absolute(), folder.absolute()))
                break
    return found


def _config(run_dir: Path) -> str:
    path = run_dir / "config.yaml"
    try:
        with path.open("rb") as file:
            text = file.read(CONFIG_BYTES + 1)
    except OSError:
        return ""
    return hidden_config(text.decode(errors="replace")) if len(text) <= CONFIG_BYTES else ""


def write(run_dir: Path, output: Path | None) -> str:
    """Write the page, at once or not at all; returns a sentence that says so. Args: output: None: in the run directory."""
    path = run_dir / FILE if output is None else output
    text = page(gather(run_dir, links_from=path.parent)).encode()
    fresh = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        fresh.write_bytes(text)
        fresh.replace(path)
    except OSError as error:
        fresh.unlink(missing_ok=True)
        raise EnvironmentUnusable(f"{path} cannot be written: {error.strerror}") from None
    return f"{path}: {size(len(text))}"


def as_markdown(run_dir: Path) -> str:
    """The report for an issue or a chat."""
    return markdown(gather(run_dir, links_from=None))


def serve(run_dir: Path, port: int, say: Callable[[str], None]) -> None:
    """Serve the page until Ctrl-C.

    Args:
        port: of loopback; 0: any that is free.
        say: is told where it is.

    Raises:
        EnvironmentUnusable: it is no run directory, or the port is taken.
    """

    def render() -> bytes:
        return page(gather(run_dir, links_from=None, every_s=EVERY_S)).encode()

    try:
        server = PageServer(render, fresh_s=EVERY_S / 2, port=port)
    except OSError as error:
        raise EnvironmentUnusable(f"port {port} of {HOST} cannot be used: {error.strerror}") from None
    server.page()
    say(f"{server.address} (Ctrl-C ends it)")
    with contextlib.suppress(KeyboardInterrupt):
        server.run()
