"""benchmarks/gpu.py without a GPU: it goes on where it was cut off, and says of every figure that no GPU has seen it."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from campaigns import wait_for
from forked import forked

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CHEAP = ("matmul", "copies", "start", "eager", "flash-attn")


def _run(out: Path, cases: tuple[str, ...]) -> None:
    """In a process of its own, as the command does it."""
    sys.path.append(str(BENCHMARKS))
    import gpu

    sys.exit(gpu.run(out, dry=True, chosen=cases))


@pytest.fixture
def gpu() -> Any:
    """The script as a module; its folder comes last."""
    before = [*sys.path]
    sys.path.append(str(BENCHMARKS))
    import gpu

    yield gpu
    sys.path[:] = before


def journal(out: Path) -> list[dict[str, Any]]:
    """What is there, but for a line that was cut off."""
    path = out / "gpu.jsonl"
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def test_a_benchmark_that_is_killed_at_five_places_goes_on_and_repeats_nothing(tmp_path: Path):
    out = tmp_path / "out"
    for place in range(1, 6):  # lines that are there: the first one is the head's
        process = forked(_run, out, CHEAP, daemon=False)
        wait_for(lambda out=out, place=place: len(journal(out)) >= place, f"{place} lines")
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        before = journal(out)
        assert len(before) >= place
        with (out / "gpu.jsonl").open("a") as file:
            file.write('{"case": "eager", "fig')  # of a write that was cut off
    process = forked(_run, out, CHEAP, daemon=False)
    process.join()
    assert process.exitcode == 0
    lines = journal(out)
    assert lines[: len(before)] == before
    assert [line["case"] for line in lines[1:]] == list(CHEAP), "each once, in their order"
    found = json.loads((out / "gpu.json").read_text())
    assert {each["case"] for each in found["figures"]} == {*CHEAP} - {"flash-attn"}
    assert not any(each["gpu"] for each in found["figures"])
    assert (list(found["left_out"]), found["errors"]) == (["flash-attn"], {})
    assert (found["mode"], found["device"]) == ("dry run", "CPU")
    rows = (out / "gpu.md").read_text().splitlines()
    assert sum("| no |" in row for row in rows) == len(found["figures"]) + 1
    assert "% of" not in rows[0]


def test_a_case_that_failed_or_hangs_is_told_and_tried_again(tmp_path: Path, gpu: Any, monkeypatch: pytest.MonkeyPatch):
    import gpu_cases

    def fails(_: object) -> Any:
        raise RuntimeError("CUDA error: out of memory")

    def dies(_: object) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    def hangs(_: object) -> Any:
        signal.pause()

    works = lambda setting: [setting.figure("speed", "tokens/s", setting.known.get("before/speed", 1.0))]  # noqa: E731
    cases = {"before": works, "fails": fails, "dies": dies, "hangs": hangs, "after": works}
    monkeypatch.setattr(gpu_cases, "CASES", cases)
    monkeypatch.setattr(gpu, "about_this", lambda _: {"mode": "dry run", "device": "CPU", "commit": "x"})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpu.run(tmp_path, dry=True, chosen=(), limit_s=5.0) == 1
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert [each["case"] for each in found["figures"]] == ["before", "after"]
    assert {case: error.strip().splitlines()[-1] for case, error in found["errors"].items()} == {
        "fails": "RuntimeError: CUDA error: out of memory",
        "dies": "its process ended with -9",
        "hangs": "not finished within 5 s",
    }
    cases.update(fails=works, dies=works, hangs=works)
    assert gpu.run(tmp_path, dry=True, chosen=()) == 0
    again = ["fails", "dies", "hangs"]
    assert [line["case"] for line in journal(tmp_path)[1:]] == ["before", *again, "after", *again]
    assert json.loads((tmp_path / "gpu.json").read_text())["errors"] == {}


def test_figures_of_two_machines_are_never_in_one_file(tmp_path: Path, gpu: Any):
    gpu.Journal(tmp_path / "gpu.jsonl", {"device": "NVIDIA H100", "mode": "measured"})
    with pytest.raises(ValueError, match=r"NVIDIA H100.*--out"):
        gpu.Journal(tmp_path / "gpu.jsonl", {"device": "CPU", "mode": "dry run"})


def test_a_gpu_has_seen_what_was_measured_on_one(tmp_path: Path, gpu: Any):
    import gpu_cases

    seen = [gpu_cases.Setting(dry, tmp_path, {}).figure("speed", "tokens/s", 1.0) for dry in (False, True)]
    outcomes = [gpu.Outcome("eager", (seen[0],)), gpu.Outcome("plain", (seen[1],))]
    about = {"mode": "measured", "device": "NVIDIA H100", "commit": "x"}
    result = gpu.results(about, outcomes)
    assert [each["gpu"] for each in result["figures"]] == [True, False]
    assert "| eager | speed | 1 tokens/s | yes |" in gpu.table(result)
    assert "| plain | speed | 1 tokens/s | no |" in gpu.table(result)


@pytest.mark.soak
@pytest.mark.timeout(1500)
def test_the_whole_benchmark_runs_without_a_gpu(tmp_path: Path):
    process = forked(_run, tmp_path / "out", (), daemon=False)
    process.join()
    found = json.loads((tmp_path / "out/gpu.json").read_text())
    assert (process.exitcode, found["errors"]) == (0, {})
    names = {f"{each['case']}/{each['name']}" for each in found["figures"]}
    assert {"campaign/stall", "campaign/kill to next step", "compiled/speed", "plain/speed", "tests/skipped"} <= names
