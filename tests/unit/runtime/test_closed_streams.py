"""Commands whose standard streams were closed before they began, as by `>&-`."""

import subprocess
import sys
from pathlib import Path

import pytest

from resilient import ledger


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "logs/g1").mkdir(parents=True)
    (tmp_path / "logs/g1/node0.log").write_text("2026-01-31 12:05:00.000 [rank 0] hello\n")
    started = ledger.event_entry("run_started", {"name": "gpt", "target_step": 9}, generation=0, t=1.0)
    (tmp_path / ledger.EVENTS).write_bytes(ledger.encoded(started))
    for step in (1, 2):
        (tmp_path / f"checkpoints/step-0000000{step}").mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "closed", "code", "said"),
    [
        (["logs"], ">&-", 0, ""),
        (["ckpt", "ls"], ">&-", 0, ""),
        (["ckpt", "verify"], ">&-", 1, "resilient: RUN/checkpoints/step-00000001 is damaged"),
        (["ckpt", "ls"], "2>&-", 0, ""),
        (["ckpt", "prune", "--keep-last", "7"], "<&- >&-", 0, ""),
        (["logs"], "<&- >&- 2>&-", 0, ""),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, list) else None,
)
def test_a_stream_that_is_closed_ends_no_command(run_dir: Path, words: list[str], closed: str, code: int, said: str) -> None:
    shell = ["bash", "-c", f'"$@" {closed}', "bash"]
    done = subprocess.run(
        [*shell, sys.executable, "-m", "resilient", *words, str(run_dir)], capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    assert done.stderr.startswith(said.replace("RUN", str(run_dir))) and "Traceback" not in done.stderr
