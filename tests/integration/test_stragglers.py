"""A rank that is slower than the others is named, and a machine that is busy as a whole is nobody's fault."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator

import pytest
from campaigns import Campaign, wait_for

pytestmark = pytest.mark.alone

Counting = Callable[..., Campaign]

WORK = {"work": 800_000, "step_s": 0.0}  # some 20 ms
SOON = {"straggler_steps": 15}
CORES = sorted(os.sched_getaffinity(0))

several = pytest.mark.skipif(len(CORES) < 2, reason="NOT TESTED HERE: a rank with less of a core than the other needs two cores")


@contextlib.contextmanager
def load(*cores: set[int]) -> Iterator[None]:
    """Processes that compute as long as this one lives, each on its cores."""
    endless = f"while kill -0 {os.getpid()}; do :; done"
    started = [
        subprocess.Popen(["sh", "-c", endless], start_new_session=True) for _ in cores
    ]  # sessions are weighed, not processes
    try:
        for process, where in zip(started, cores, strict=True):
            os.sched_setaffinity(process.pid, where)
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def share(run: Campaign, core: int, other: int) -> None:
    """Rank 1 gets one core, rank 0 another."""
    for rank, pid in run.workers().items():
        os.sched_setaffinity(pid, {core if rank == 1 else other})


@several
def test_a_rank_that_must_share_its_core_is_reported_until_it_has_it_again(counting: Counting):
    run = counting(steps=100_000, every_steps=1000, args=WORK, resilience=SOON).start()
    run.reach(10)
    share(run, CORES[0], CORES[1])
    with load({CORES[0]}, {CORES[0]}, {CORES[0]}):
        wait_for(lambda: run.events("fault"), f"the straggler\n{run.logs()}")
    wait_for(lambda: run.events("recovered"), f"its end\n{run.logs()}")
    run.signal(signal.SIGTERM)
    assert run.wait() == 75, run.output
    fault, action = run.events("fault")[0], run.events("action")[0]
    assert (fault["kind"], fault["ranks"], fault["nodes"]) == ("straggler", [1], [0]), fault
    assert "rank 1 on node 0 needs" in fault["detail"] and "rank 0 " in fault["evidence"], fault
    assert (action["name"], action["fault_id"]) == ("report", fault["fault_id"])
    assert run.events("recovered")[0]["fault_id"] == fault["fault_id"]
    assert len(run.events("generation_started")) == 1


@pytest.mark.soak
def test_a_rank_whose_samples_come_slowly_is_reported(counting: Counting):
    run = counting(steps=100_000, every_steps=1000, args={"load_s": 0.02, "step_s": 0.0}, resilience=SOON).start()
    wait_for(lambda: run.events("fault"), f"the straggler\n{run.logs()}")
    run.signal(signal.SIGTERM)
    assert run.wait() == 75, run.output
    fault = run.events("fault")[0]
    assert (fault["kind"], fault["ranks"]) == ("straggler", [1]), fault


@pytest.mark.soak
def test_a_rank_whose_gpu_is_slow_is_reported_although_all_processors_do_the_same(counting: Counting):
    args = {"device_s": 0.02, "step_s": 0.06, "work": 20_000}  # made up: all wait for the slow one, as in a collective
    run = counting(steps=100_000, every_steps=1000, args=args, resilience=SOON).start()
    wait_for(lambda: run.events("fault"), f"the straggler\n{run.logs()}")
    run.signal(signal.SIGTERM)
    assert run.wait() == 75, run.output
    fault = run.events("fault")[0]
    assert (fault["kind"], fault["ranks"], fault["nodes"]) == ("straggler", [1], [0]), fault
    assert "needs 3.0" in fault["detail"], "three times as long as the other, as the GPUs have told"


@several
@pytest.mark.soak
def test_the_node_of_a_straggler_is_replaced_once_where_that_is_asked_for(counting: Counting):
    cluster = {"nodes": 2, "procs_per_node": 1}
    run = counting(steps=100_000, every_steps=20, args=WORK, resilience={**SOON, "straggler": "replace"}, cluster=cluster).start()
    run.reach(10)
    first = run.workers()
    share(run, CORES[0], CORES[1])
    with load({CORES[0]}, {CORES[0]}, {CORES[0]}):
        wait_for(lambda: run.events("recovered"), f"a recovery\n{run.logs()}")
    assert run.workers()[1] != first[1]
    run.signal(signal.SIGTERM)
    assert run.wait() == 75, run.output
    fault, action = run.events("fault")[0], run.events("action")[0]
    assert (fault["kind"], fault["ranks"], fault["nodes"], action["name"]) == ("straggler", [1], [1], "replace_node"), fault
    assert len(run.events("generation_started")) == 2


@pytest.mark.soak
def test_a_machine_that_is_busy_as_a_whole_has_no_straggler(counting: Counting):
    with load(*[set(CORES)] * len(CORES)):
        run = counting(steps=300, every_steps=1000, args=WORK, resilience=SOON)
        assert run.run() == 0, run.output + run.logs()
    assert not run.events("fault")
