"""Training data that is away for some seconds: ranks that find nothing of it wait for it, and go on as if nothing had happened."""

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

from campaigns import STEPS, Campaign, Training, holding, same, wait_for

FAILURES = 4  # as many as end a run where nothing is waited for, and one more


def test_data_that_is_away_for_a_while_is_waited_for(
    training: Training, reference_runs: Callable[[str], Campaign], dataset: Path, tmp_path: Path
):
    place, away = tmp_path / "mounted", tmp_path / "away"
    shutil.copytree(dataset.parent, place)
    run = training(data={"path": str(place / dataset.name)}, **holding(STEPS // 2, backoff_s=1.0)).start()
    run.reach(STEPS // 2)
    place.rename(away)
    os.kill(run.workers()[0], signal.SIGKILL)

    def failures() -> bool:
        return sum(event["kind"] == "exception" for event in run.events("fault")) >= FAILURES or run._ended()

    wait_for(failures, run.logs)
    assert not run._ended(), run._printed()
    away.rename(place)
    run.go_on()
    assert run.wait() == 0, run.output
    told = [event for event in run.events("fault") if event["kind"] == "exception"]
    assert all(f"missing or unreadable: {place / dataset.name}" in event["detail"] for event in told)
    same(run, reference_runs("bf16"))
