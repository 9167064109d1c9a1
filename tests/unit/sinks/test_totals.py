"""What lines come to: the same numbers that `resilient status` tells."""

import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from resilient import ledger
from resilient.account import PLANNED, account
from resilient.sinks import totals
from resilient.sinks.following import LineFile, TotalsReader
from resilient.sinks.measures import measured
from resilient.sinks.totals import Totals
from resilient.status import overview


def alive() -> bool:
    """The driver is there."""
    return True


def test_every_number_is_that_of_the_status(written):
    written.started()
    for step in range(1, 40):
        written.step(step)
        if step % 10 == 0:
            written.event("snapshot", step=step, tier="ram", stall_s=0.01, bytes=1)
            written.event("committed", step=step, tier="durable")
    written.fault(1)
    written.fault(2, kind="preempted", generation=2)
    for step in range(38, 60):
        written.step(step, generation=3)
    written.event("validation", 3, step=59, val_loss=1.5)
    written.finished(70, generation=3)
    found, shown = TotalsReader(written.run_dir, alive)(), overview(written.run_dir)
    assert (found.name, found.step, found.target_step, found.generation) == ("demo", shown.step, 100, shown.generation)
    assert (found.last["loss"], found.last["tokens_per_s"]) == (shown.loss, shown.tokens_per_s)
    assert (found.recovered, found.downtime.down_s, found.downtime.lost_steps) == (
        shown.recovered,
        shown.downtime_s,
        shown.lost_steps,
    )
    assert sum(count for kind, count in found.faults.items() if kind not in PLANNED) == shown.faults
    assert (found.validation_loss, found.exit_code, found.running) == (shown.validation_loss, shown.last_exit_code, False)
    assert found.checkpoints.newest()["durable"][0] == shown.checkpoint_step
    assert found.rank_seconds == pytest.approx(shown.rank_seconds)
    assert found.goodput == pytest.approx(shown.goodput)
    assert sum(found.step_counts) == len(list(ledger.read_metrics(written.run_dir / ledger.METRICS)))


def wild(written, chance: random.Random) -> Iterator[None]:
    """Three jobs with faults, snapshots and long starts, bit by bit."""
    generation = 1
    step = 1
    for _ in range(3):
        written.event("run_started", generation, name="demo", target_step=5000)
        written.t += chance.uniform(1.0, 200.0)
        ranks = chance.choice([2, 4, 8])
        written.event("generation_started", generation, nodes=["here"], world_size=ranks, resumed_step=step - 1 or None)
        for _ in range(200):
            written.step(step, generation, step_s=chance.uniform(0.1, 3.0), data_s=0.05)
            if chance.random() < 0.1:
                written.event("snapshot", generation, step=step, tier="ram", stall_s=0.02, bytes=1)
            if chance.random() < 0.02:
                written.fault(step, generation=generation)
                generation += 1
                step = max(0, step - 3)
            step += 1
            yield
        written.finished(75, generation)
        generation += 1
        written.t += chance.uniform(1.0, 1000.0)


@pytest.mark.parametrize("seed", range(4))
def test_an_account_that_goes_on_is_that_of_all_lines(written, seed: int, monkeypatch: pytest.MonkeyPatch):
    """Read bit by bit, in one go at the end or also asked in between."""
    monkeypatch.setattr("resilient.past.stream.BLOCK_BYTES", 4000)
    reader = TotalsReader(written.run_dir, alive)
    for number, _ in enumerate(wild(written, random.Random(seed))):
        if seed % 2 and number % 40 == 0:
            reader()
    files = [written.run_dir / name for name in (ledger.EVENTS, ledger.METRICS)]
    events, metrics = ledger.read_events(files[0]), ledger.read_metrics(files[1])
    expected = account(events, metrics)
    found = reader()
    assert found.rank_seconds == pytest.approx(expected.seconds)
    assert found.goodput == pytest.approx(expected.goodput)
    assert expected.seconds["start"] > 0 and expected.seconds["rework"] > 0


def test_a_start_that_takes_long_counts_for_the_ranks_that_it_leads_to(written):
    """How many there are is said only then."""
    reader = TotalsReader(written.run_dir, alive)
    written.started(ranks=2)
    written.step(1)
    written.finished(75)
    written.t += 500.0
    written.event("run_started", 2, name="demo", target_step=100)
    written.t += 200.0
    written.event("health", 2, node=0, ok=True, findings=[])
    reader()
    written.t += 10.0
    written.event("generation_started", 2, nodes=["here"], world_size=8, resumed_step=1)
    written.step(2, generation=2)
    events, metrics = (list(ledger.read(written.run_dir / name)) for name in (ledger.EVENTS, ledger.METRICS))
    assert reader().rank_seconds["start"] == pytest.approx(account(events, metrics).seconds["start"])


def test_an_account_keeps_no_more_than_the_last_minute(written):
    written.started()
    for step in range(1, 2001):
        written.step(step)
    reader = TotalsReader(written.run_dir, alive)
    reader()
    assert len(reader._account._recent) <= totals.SETTLED_S / 0.5 + 3


@pytest.mark.parametrize("large", [{"lr": 10**400}, {"steps": 10**400}, {"tokens": -(10**400)}], ids=["lr", "steps", "tokens"])
def test_a_whole_number_beyond_all_bounds_costs_no_line(written, large: dict[str, int]):
    written.started()
    for step in range(1, 101):
        written.step(step, **{"lr": 0.25, **(large if step == 50 else {})})
    found = TotalsReader(written.run_dir, alive)()
    assert (found.step, sum(found.step_counts), found.step_sum_s, found.last["lr"]) == (100, 100, 50.0, 0.25)
    list(measured(found))


def test_a_line_that_cannot_be_counted_costs_no_other(written, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    written.started()
    for step in range(1, 101):
        written.step(step)
    take = Totals.take

    def some(self: Totals, line: Mapping[str, Any]) -> None:
        if line.get("step") == 50:
            raise OverflowError("too large")
        take(self, line)

    monkeypatch.setattr(Totals, "take", some)
    reader = TotalsReader(written.run_dir, alive)
    assert [(found.step, sum(found.step_counts)) for found in (reader(), reader())] == [(100, 99), (100, 99)]
    assert [each.getMessage().endswith("does not count: too large") for each in caplog.records] == [True]


def test_lines_are_read_from_an_offset_on_and_only_whole_ones(tmp_path: Path):
    path = tmp_path / ledger.METRICS
    line = b'{"step": %d, "generation": 1, "t": 5.0}\n'
    path.write_bytes(line % 1 + line % 2 + (line % 3)[:-5])
    file = LineFile(path)
    first = file.read()
    assert [each.entry["step"] for each in first] == [1, 2]
    with path.open("ab") as out:
        out.write((line % 3)[-5:] + b"rubbish\n" + line % 4)
    assert [each.entry["step"] for each in file.read()] == [3, 4]
    assert [each.entry["step"] for each in LineFile(path, first[0].end_bytes).read()] == [2, 3, 4]
    assert [each.entry["step"] for each in LineFile(path, first[0].end_bytes + 3).read()] == [3, 4]


def test_a_file_that_has_lost_its_end_is_waited_for(tmp_path: Path):
    path = tmp_path / ledger.METRICS
    line = b'{"step": 1, "generation": 1, "t": 5.0}\n'
    path.write_bytes(line)
    file = LineFile(path, 2 * len(line))
    assert file.read() == []
    path.write_bytes(3 * line)
    assert [each.end_bytes for each in file.read()] == [3 * len(line)]


def moved_aside(run_dir: Path) -> None:
    """As a person does it between two jobs."""
    for name in (ledger.EVENTS, ledger.METRICS):
        if (run_dir / f"{name}.1").exists():
            (run_dir / f"{name}.1").rename(run_dir / f"{name}.2")
        (run_dir / name).rename(run_dir / f"{name}.1")


def test_files_that_are_moved_aside_change_no_number_and_no_offset(written):
    run_dir = written.run_dir
    follower, taken = TotalsReader(run_dir, alive), []
    for job in range(3):
        written = type(written)(run_dir)  # opens the files, as the next job does
        written.t += 1000.0 * job
        written.started()
        written.step(job + 1)
        written.finished(75)
        at_bytes = taken[-1].end_bytes if taken else 0
        taken += LineFile(run_dir / ledger.METRICS, at_bytes).read()
        assert follower() == TotalsReader(run_dir, alive)()
        moved_aside(run_dir)
        assert (follower().jobs, follower().step, follower().exit_code) == (job + 1, job + 1, 75)
    assert [line.entry["step"] for line in taken] == [1, 2, 3]


def test_a_part_that_ends_within_a_line_takes_nothing_from_the_next(tmp_path: Path):
    path, line = tmp_path / ledger.METRICS, b'{"step": %d, "generation": 1, "t": 5.0}\n'
    path.with_name(f"{ledger.METRICS}.1").write_bytes(line % 1 + b'{"st')
    path.write_bytes(line % 2 + line % 3)
    file = LineFile(path)
    assert [each.entry["step"] for _ in range(3) for each in file.read()] == [1, 2, 3]
    assert [each.entry["step"] for each in LineFile(path, len(line % 1) + 4).read()] == [2, 3]
