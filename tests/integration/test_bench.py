"""`resilient bench` as a person runs it: cells that work, that are refused, that die and that hang; killed, and run again."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from campaigns import ROOT, alive, wait_for

from resilient.config import load

GRID = {
    "name": "toys",
    "config": {"entrypoint": "benched:train", "cluster": {"procs_per_node": 1, "device": "cpu"}},
    "warmup_steps": 2,
    "steps": 8,
    "limit_s": 300.0,  # which no cell comes to, however busy the machine is
}


class Bench:
    """A grid's file, its results, and the command."""

    def __init__(self, directory: Path, **grid: Any) -> None:
        self.results = directory / "results"
        self.best = directory / "best.yaml"
        self._file = directory / "grid.yaml"
        self._file.write_text(yaml.safe_dump({**GRID, **grid}))
        self._directory = directory

    def start(self) -> subprocess.Popen[str]:
        environ = {**os.environ, "PYTHONPATH": f"{Path(__file__).parent}{os.pathsep}{ROOT}"}
        words = ["bench", str(self._file), "--dir", str(self.results), "--best", str(self.best)]
        return subprocess.Popen(
            [sys.executable, "-m", "resilient", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environ,
            cwd=self._directory,
            text=True,
            start_new_session=True,
        )

    def run(self) -> str:
        process = self.start()
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, output
        return output

    def rows(self) -> list[dict[str, Any]]:
        path = self.results / "results.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.soak
def test_each_cell_is_a_row_and_the_best_one_is_a_config_that_runs(tmp_path: Path):
    cells = [{"args.tokens": 100}, {"args.tokens": 300}, {"args.raises": True}, {"parallel.tp": 3}]
    bench = Bench(tmp_path, cells=cells)
    output = bench.run()
    rows = bench.rows()
    assert [row["state"] for row in rows] == ["measured", "measured", "failed", "refused"]
    assert (rows[1]["steps"], rows[1]["world_size"], rows[1]["tokens_per_s"]["median"]) == (8, 1, 15000)
    assert (rows[1]["memory_bytes"], rows[1]["predicted_bytes"], rows[1]["predicted_state_bytes"]) == (1 << 20, 1 << 19, 1 << 18)
    assert (rows[0]["work"]["flops"], rows[0]["bubble"]) == (1e11, 0)
    assert "tokens 300" in (bench.results / "index.html").read_text()
    assert "this layout does not work" in rows[2]["why"] and "exit code 70" in rows[2]["why"]
    assert "parallel.tp" in rows[3]["why"]
    assert all(word in output for word in ("tokens 300", "15,000", "this layout does not work"))
    assert load(bench.best).args == {"tokens": 300}
    assert "1 of 4" not in bench.run() and len(bench.rows()) == 4  # nothing is run twice


@pytest.mark.soak
@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGTERM], ids=lambda sig: sig.name)
def test_a_bench_that_is_ended_in_a_cell_goes_on_with_it(tmp_path: Path, sig: signal.Signals):
    bench = Bench(tmp_path, cells=[{"parallel.tp": 3}, {"args.step_s": 2.0}])
    process = bench.start()
    metrics = bench.results / "cell-002/run/metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.stat().st_size, "the second cell")
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(sig)
    assert process.wait(200) == (75 if sig is signal.SIGTERM else -sig)
    assert len(bench.rows()) == 1
    config = bench.results / "cell-002/config.yaml"
    before = config.stat().st_mtime_ns
    again = bench.start()
    wait_for(lambda: config.exists() and config.stat().st_mtime_ns != before, "the second cell once more")
    wait_for(lambda: not any(alive(each) for each in family), "the end of what the killed command had started")
    output, _ = again.communicate(timeout=300)
    assert again.returncode == 0, output
    assert [row["state"] for row in bench.rows()] == ["refused", "measured"]


def test_a_cell_that_hangs_is_ended_at_its_limit(tmp_path: Path):
    bench = Bench(tmp_path, cells=[{"args.hangs": True}, {"parallel.tp": 3}], limit_s=40.0)
    process = bench.start()
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 69 and "no cell was measured" in output, output
    assert [row["state"] for row in bench.rows()] == ["timed_out", "refused"]
    assert "not done after 40 s" in bench.rows()[0]["why"]
