"""benchmarks/gpu.py without a GPU: it goes on where it was cut off, and says of every figure that no GPU has seen it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from campaigns import wait_for
from forked import forked

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CHEAP = ("matmul", "copies", "start", "eager", "flash-attn")
ABOUT: dict[str, Any] = {"mode": "dry run", "device": "CPU", "versions": {"torch": "1.2"}, "commit": "x"}
ON_A_GPU: dict[str, Any] = {**ABOUT, "mode": "measured", "device": "NVIDIA H100"}


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


@pytest.fixture
def cases(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The list of cases, empty."""
    import gpu_cases

    found: dict[str, Any] = {}
    monkeypatch.setattr(gpu_cases, "CASES", found)
    monkeypatch.setattr(gpu, "about_this", lambda _: ABOUT)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return found


def journal(out: Path) -> list[dict[str, Any]]:
    """What is there, but for a line that was cut off."""
    path = out / "gpu.jsonl"
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


@pytest.mark.soak
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


def test_a_case_that_failed_or_hangs_is_told_and_tried_again(tmp_path: Path, gpu: Any, cases: dict[str, Any]):
    def fails(_: object) -> Any:
        raise RuntimeError("CUDA error: out of memory")

    def dies(_: object) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    def hangs(_: object) -> Any:
        signal.pause()

    works = lambda setting: [setting.figure("speed", "tokens/s", setting.known.get("before/speed", 1.0))]  # noqa: E731
    cases.update({"before": works, "fails": fails, "dies": dies, "hangs": hangs, "after": works})
    assert gpu.run(tmp_path, dry=True, chosen=(), limit_s=20.0) == 1
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert [each["case"] for each in found["figures"]] == ["before", "after"]
    assert {case: error.strip().splitlines()[-1] for case, error in found["errors"].items()} == {
        "fails": "RuntimeError: CUDA error: out of memory",
        "dies": "its process ended with -9",
        "hangs": "not finished within 20 s",
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
    result = gpu.results(ON_A_GPU, outcomes)
    assert [each["gpu"] for each in result["figures"]] == [True, False]
    assert "| eager | speed | 1 tokens/s | yes |" in gpu.table(result)
    assert "| plain | speed | 1 tokens/s | no |" in gpu.table(result)


def test_cases_that_measure_no_speed_run_at_the_same_time(tmp_path: Path, gpu: Any, cases: dict[str, Any]):
    def meets(name: str, other: str) -> Any:
        def case(setting: Any) -> Any:
            (tmp_path / name).touch()
            wait_for((tmp_path / other).exists, other)
            return [setting.figure("met", "", 1.0)]

        return case

    cases.update(a=meets("a", "b"), b=meets("b", "a"))
    found = gpu.run_cases(["a", "b"], lambda name: gpu.Running(name, True, tmp_path, {}, 240.0), 2)
    assert {each.case: each.error for each in found} == {"a": "", "b": ""}
    groups = [*gpu.together(["x", "a", "b", "y", "z"], (frozenset("ab"), frozenset("yz")))]
    assert groups == [["x"], ["a", "b"], ["y", "z"]]
    assert [*gpu.together(["a", "x", "b"], (frozenset("ab"),))] == [["a"], ["x"], ["b"]]


def test_a_case_that_is_ended_gives_back_what_it_has_taken_and_leaves_no_process(tmp_path: Path, gpu: Any, cases: dict[str, Any]):
    def hangs(_: object) -> Any:
        child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        (tmp_path / "pid").write_text(str(child.pid))
        try:
            signal.pause()
        finally:
            (tmp_path / "given back").touch()

    cases.update(hangs=hangs)
    assert gpu.run(tmp_path / "out", dry=True, chosen=(), limit_s=15.0) == 1
    assert (tmp_path / "given back").exists()
    pid = int((tmp_path / "pid").read_text())
    wait_for(lambda: not Path(f"/proc/{pid}").exists() or "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text(), "its end")


def test_what_no_time_is_left_for_is_told_and_run_by_the_next_start(tmp_path: Path, gpu: Any, cases: dict[str, Any]):
    left_s = 8.0  # of the time that is left for a case to begin: more than a busy machine takes to begin the first one

    def slow(setting: Any) -> Any:
        if not (tmp_path / "slow").exists():
            (tmp_path / "slow").touch()
            time.sleep(left_s + 0.5)
        return [setting.figure("speed", "tokens/s", [1.0, 3.0, 2.0])]

    cases.update(first=slow, second=slow)
    gpu._import_ahead()
    assert gpu.run(tmp_path, dry=True, chosen=(), minutes=(gpu.LEAST_S + left_s) / 60) == 1
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert ([each["case"] for each in found["figures"]], found["not_reached"]) == (["first"], ["second"])
    assert "| second | not reached |" in (tmp_path / "gpu.md").read_text()
    assert gpu.run(tmp_path, dry=True, chosen=()) == 0
    assert [line["case"] for line in journal(tmp_path)[1:]] == ["first", "second"]
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert [(each["value"], each["measured"]) for each in found["figures"]] == [(2.0, [1.0, 3.0, 2.0])] * 2


def test_a_figure_is_compared_with_one_of_another_case_whichever_came_first(tmp_path: Path, gpu: Any):
    import gpu_cases

    setting = gpu_cases.Setting(False, tmp_path, {})
    eager = setting.figure("speed", "tokens/s", [3.0, 1.0, 2.0], peer="plain/speed")
    memory = setting.figure("memory", "GiB", 6.0, peer="the plan", peer_value=4.0)
    alone = setting.figure("stall", "s", 1.0, peer="copies/not measured")
    plain = setting.figure("speed", "tokens/s", 4.0)
    result = gpu.results(ON_A_GPU, [gpu.Outcome("eager", (eager, memory, alone)), gpu.Outcome("plain", (plain,))])
    assert [each["ratio"] for each in result["figures"]] == [0.5, 1.5, None, None]
    assert "| eager | speed | 2 tokens/s | yes | plain/speed: 4 tokens/s | 0.5 |" in gpu.table(result)
    kept = gpu.for_the_page(result).figures
    assert [(each.name, each.peer, each.ratio and each.ratio.median) for each in kept] == [
        ("eager/speed", "plain", 0.5),
        ("eager/memory", "the plan", 1.5),
        ("eager/stall", "", None),
        ("plain/speed", "", None),
    ]
    assert (kept[0].value.low, kept[0].value.high, kept[0].value.n) == (1.0, 3.0, 3)


def test_a_result_from_another_machine_becomes_a_section_and_one_of_a_dry_run_does_not(tmp_path: Path, gpu: Any):
    import figures
    import gpu_cases
    import pages

    for dry in (False, True):
        setting = gpu_cases.Setting(dry, tmp_path, {})
        outcomes = [gpu.Outcome("plain", (setting.figure("speed", "tokens/s", 4.0, "a | b"),)), gpu.Outcome("x", error="E\nwhy")]
        (tmp_path / f"{dry}.json").write_text(json.dumps(gpu.results(ABOUT if dry else ON_A_GPU, outcomes)))
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--json", str(tmp_path / "kept.json"), "--render"]
    refused = subprocess.run([*command, str(tmp_path / "True.json")], check=False, capture_output=True, text=True)
    assert (refused.returncode, (tmp_path / "kept.json").exists()) == (2, False)
    assert "dry run" in refused.stderr
    subprocess.run([*command, str(tmp_path / "False.json")], check=True)
    page = pages.page([], figures.read(tmp_path / "kept.json"))
    section = page[page.index("## One GPU") :]
    assert "GPU: NVIDIA H100" in section and "torch 1.2" in section and "**Not all of it was measured:** x: why" in section
    assert "| plain: speed | 4.00 tokens/s |  |  | a \\| b |" in section


def test_a_loss_that_differs_by_a_bit_or_is_missing_is_counted(gpu: Any):
    from gpu_campaigns import different

    def run(*losses: float) -> list[dict[str, float]]:
        return [{"step": step, "loss": loss} for step, loss in enumerate(losses, 1)]

    right = run(1.0, 0.1 + 0.2, 0.5)
    assert different(right, run(1.0, 0.1 + 0.2, 0.5)) == set()
    assert different(right, [*run(1.0, 0.1 + 0.2), *right]) == set(), "computed again, and the same"
    assert different(right, [*right, {"step": 2, "loss": 0.3}]) == {2}
    assert different(right, run(1.0, 0.3)) == {2, 3}


def test_steps_are_told_apart_by_the_snapshots_between_them(gpu: Any):
    from gpu_campaigns import Steps

    def lines(generation: int, *moments: float) -> list[dict[str, float]]:
        return [{"generation": generation, "step": step, "t": t, "step_s": 1.0} for step, t in enumerate(moments, 1)]

    found = Steps.of([*lines(1, 0.0, 17.0, 18.0, 20.0, 21.0), *lines(2, 50.0, 51.5, 52.5)], {(1, 3)})
    assert found == Steps(calm=[1.0, 1.0, 1.0], with_snapshot=[2.0], pauses=[16.0, 0.5])


@pytest.mark.soak
@pytest.mark.timeout(1500)
def test_the_whole_benchmark_runs_without_a_gpu(tmp_path: Path):
    process = forked(_run, tmp_path / "out", (), daemon=False)
    process.join()
    found = json.loads((tmp_path / "out/gpu.json").read_text())
    assert (process.exitcode, found["errors"]) == (0, {})
    names = {f"{each['case']}/{each['name']}" for each in found["figures"]}
    assert {"campaign/stall", "campaign/kill to next step", "compiled/speed", "plain/speed", "tests/skipped"} <= names
    values = {f"{each['case']}/{each['name']}": each["value"] for each in found["figures"]}
    right = {"doctor/failed": 0, "quickstart/exit status": 0, "kills/kills that hit": 1, "kills/steps whose loss differs": 0}
    right |= {"chaos/invariants that do not": 0, "campaign/kills after which the standby went on": 1}
    assert {name: values[name] for name in right} == right
