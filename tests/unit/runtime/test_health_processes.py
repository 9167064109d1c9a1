"""Health checks as processes: what hangs is killed at its limit, what computes wrong is found."""

import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import health_tasks
import pytest
import torch

from resilient.health import compute, gpus
from resilient.health.bounded import Examination, Task
from resilient.health.node import NodeCheck, NodeSpec
from resilient.health.report import Finding

SPAWN = multiprocessing.get_context("spawn")
LONG_S = 300.0


@contextmanager
def examined(*tasks: Task, limit_s: float = LONG_S) -> Iterator[list[Finding]]:
    examination = Examination(tasks, SPAWN, limit_s)
    try:
        yield examination.finish()
    finally:
        examination.close()
    assert examination.left_behind == []


def states(pids: Path) -> str:
    """Of the processes that a check has written down; empty if there are none, or they are gone."""
    found = ""
    for pid in pids.read_text().split() if pids.exists() else []:
        with suppress(OSError):
            found += Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    return found


@pytest.mark.parametrize(("run", "state", "word"), [("hangs_with_a_child", "SS", "waiting"), ("stops", "T", "stopped")])
def test_a_check_that_hangs_is_killed_with_what_it_started_and_the_others_answer(tmp_path: Path, run: str, state: str, word: str):
    pids = tmp_path / "pids"
    now = 0.0
    hangs = Task(("disk",), getattr(health_tasks, run), ("disk", pids), 4.0)
    examination = Examination([hangs, Task(("link",), health_tasks.good, ("link",), LONG_S)], SPAWN, LONG_S, clock=lambda: now)
    try:
        while examination.pending != ["disk"] or states(pids) != state:
            assert not examination.collect()
        now = 4.0
        assert examination.collect()
        findings = examination.findings
    finally:
        examination.close()
    assert [(each.check, each.verdict) for each in findings] == [("disk", "fail"), ("link", "ok")]
    assert "no answer within 4 s" in findings[0].text
    assert word in findings[0].text
    deadline = time.monotonic() + 60.0
    while states(pids).strip("Z"):  # a process that was killed is gone when the kernel has come to it
        assert time.monotonic() < deadline


def test_one_limit_holds_for_all_checks_together(tmp_path: Path):
    with examined(Task(("gpu",), health_tasks.stops, ("gpu", tmp_path / "pid"), LONG_S), limit_s=0.5) as findings:
        assert findings[0].verdict == "fail"
        assert "within 0.5 s" in findings[0].text


def test_a_check_that_ends_too_early_owes_what_it_has_not_told():
    tasks = [
        Task(("bytes", "inodes"), health_tasks.half, ("bytes",), LONG_S),
        Task(("gpu",), health_tasks.killed, ("gpu",), LONG_S),
    ]
    with examined(*tasks) as findings:
        assert [(each.check, each.verdict) for each in findings] == [("bytes", "ok"), ("inodes", "fail"), ("gpu", "fail")]
        assert "the other half is missing" in findings[1].text and "health_tasks.py" in findings[1].text
        assert "SIGKILL" in findings[2].text


# -- computing -----------------------------------------------------------------------------------------------------------


def ranks(tmp_path: Path, count: int, limit_s: float = LONG_S) -> compute.Ranks:
    return compute.Ranks(count, "cpu", tmp_path / "store", limit_s)


def test_every_core_of_a_rank_s_share_computes_and_the_process_is_free_again(tmp_path: Path):
    before = os.sched_getaffinity(0)
    on = set()

    def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        on.update(os.sched_getaffinity(0))
        return a @ b

    finding = compute.matmul(0, ranks(tmp_path, 1), multiply)
    assert finding.verdict == "ok"
    assert on == before == os.sched_getaffinity(0)


def test_a_core_that_gets_one_number_wrong_once_is_named(tmp_path: Path):
    last = max(os.sched_getaffinity(0))

    def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        product = a @ b
        if os.sched_getaffinity(0) == {last}:
            product.view(torch.int32)[100, 7] ^= 1
        return product

    finding = compute.matmul(0, ranks(tmp_path, 1), multiply)
    assert finding.verdict == "fail"
    assert f"core {last} computes wrong" in finding.text and "1 of 147,456 numbers" in finding.text


def test_ranks_that_outnumber_the_cores_share_them(tmp_path: Path):
    assert compute.matmul(7, ranks(tmp_path, 64)).verdict == "ok"


def all_reduced(tmp_path: Path, run: object, *args: object, count: int = 2, limit_s: float = LONG_S) -> list[Finding]:
    together = ranks(tmp_path, count, limit_s)
    tasks = [Task((f"all-reduce {rank}",), run, (rank, together, *args), limit_s) for rank in range(count)]  # type: ignore[arg-type]
    with examined(*tasks) as findings:
        return findings


@pytest.fixture(autouse=True)
def over_the_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held_s: float, limit_s: float) -> tuple[list[Finding], float, float]:
    """What the check of a node finds after a process was killed that holds memory of a GPU for so long, and when that was over.

    The last number is when it computed; 0: never.
    """
    held_t, mine, when = time.monotonic() + held_s, os.getpid(), tmp_path / "when"

    def compute_later(rank: int, _: compute.Ranks) -> Iterator[Finding]:
        when.write_text(str(time.monotonic()))
        yield from (Finding(name, "ok", "right") for name in compute.names(rank))

    monkeypatch.setattr(gpus, "_holders", lambda: {mine: 70 << 30} if time.monotonic() < held_t else {})
    monkeypatch.setattr(compute, "check", compute_later)
    spec = NodeSpec((0,), 1, "cuda", "127.0.0.1", (), tmp_path / "meeting", limit_s, stuck=(mine,))
    check = NodeCheck(spec, multiprocessing.get_context("fork"))
    try:
        check.examination.finish()
        return list(check.report().findings), held_t, float(when.read_text()) if when.exists() else 0.0
    finally:
        check.close()


def test_a_node_computes_once_the_memory_of_a_killed_process_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    found, held_t, computed_t = checked(tmp_path, monkeypatch, 1.0, LONG_S)
    assert computed_t >= held_t
    verdicts = {each.check: each.verdict for each in found}
    assert (verdicts["matmul 0"], verdicts["all-reduce 0"], verdicts[gpus.MEMORY]) == ("ok", "ok", "ok")


def test_a_node_computes_nothing_where_memory_is_held_for_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    found, _, computed_t = checked(tmp_path, monkeypatch, LONG_S, 1.0)
    assert not computed_t
    assert [each.check for each in found if each.verdict == "fail"] == [gpus.MEMORY]
    assert [each.check for each in found if each.verdict == "skip" and each.check != gpus.CHECK] == ["matmul 0", "all-reduce 0"]


def test_a_wrong_sum_is_found_on_the_rank_that_has_it(tmp_path: Path):
    good, bad = all_reduced(tmp_path, health_tasks.flips_a_bit, 1)
    assert good.verdict == "ok" and "right" in good.text, good.text
    assert bad.verdict == "fail" and "1 of 65,536 numbers are wrong" in bad.text


def test_an_all_reduce_that_a_rank_does_not_come_to_ends_at_the_limit(tmp_path: Path):
    findings = all_reduced(tmp_path, health_tasks.stays_away, 1, limit_s=12.0)
    assert [each.verdict for each in findings] == ["fail", "fail"]
