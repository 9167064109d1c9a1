"""Processes that a script starts by `torch.multiprocessing`."""

import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
from torch import multiprocessing as started

import resilient
from resilient import worker
from resilient.script import spawned

OURS = {"RESILIENT_HEARTBEAT_REGION": "nowhere", "TORCHELASTIC_USE_AGENT_STORE": "True"}


@pytest.fixture(autouse=True)
def rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**OURS, "RANK": "3"}.items():
        monkeypatch.setenv(name, value)


def says_what_it_has(number: int, folder: Path) -> None:
    (folder / f"{number}").write_text(" ".join(sorted({*OURS, "RANK"} & os.environ.keys())))
    if number == 7:
        raise ValueError("seven")


@pytest.mark.parametrize("joins", [True, False])
def test_they_have_nothing_that_is_for_ranks_alone_and_it_is_told(tmp_path: Path, joins: bool, caplog: pytest.LogCaptureFixture):
    context = spawned._wrapped(started.start_processes)(says_what_it_has, (tmp_path,), 2, joins, start_method="fork")
    assert joins == (context is None)
    while not joins and not context.join():
        pass
    assert [(tmp_path / each).read_text() for each in "01"] == ["RANK", "RANK"]
    assert os.environ["RESILIENT_HEARTBEAT_REGION"] == "nowhere", "the rank keeps it"
    assert "2 processes of its own by torch.multiprocessing: they are no ranks" in caplog.text and "--procs 2" in caplog.text


def test_an_error_of_theirs_ends_the_rank(tmp_path: Path):
    with pytest.raises(started.ProcessRaisedException, match="seven"):
        spawned._wrapped(started.start_processes)(says_what_it_has, (tmp_path,), 8, start_method="fork")


def attaches(results: Any) -> None:
    try:
        resilient.attach(model=None)  # type: ignore[arg-type]
    except worker.UnrecoverableError as error:
        results.put(str(error))


def test_to_attach_in_another_process_of_a_script_is_refused():
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    process = context.Process(target=attaches, args=(results,))
    process.start()
    said = results.get()
    process.join()
    assert "in a process that the script has started, and not in the rank itself" in said
