"""The runtime on a toy: everything that may happen to its processes, done for real."""

import contextlib
import json
import os
import random
import signal
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import psutil
import pytest
from campaigns import Campaign, alive, wait_for
from soak import soaked

from resilient.account import account
from resilient.agent.memory import region_directory
from resilient.placement.applied import of_this_node
from resilient.placement.binding import Mode, Share
from resilient.version import commit

Counting = Callable[..., Campaign]


def regions(campaign: Campaign) -> list[Path]:
    """What the agents of a run hold in shared memory."""
    place = region_directory(campaign.run_dir, 0)
    return [*place.glob("**"), *place.rglob("*")]


def whole(campaign: Campaign, steps: int) -> None:
    """Every step has one loss, however often it was computed."""
    losses = campaign.losses()
    assert sorted(losses) == list(range(1, steps + 1))
    assert all(len(values) == 1 for values in losses.values())


def test_a_run_without_faults_reaches_its_target(counting: Counting):
    run = counting()
    assert run.run() == 0, run.output + run.logs()
    whole(run, 60)
    names = [event["event"] for event in run.events()]
    assert names[0] == "run_started"
    assert (run.events()[0]["version"], run.events()[0]["commit"]) == (version("resilient"), commit())
    assert names[-1] == "run_finished"
    assert run.events("run_finished")[0]["exit_code"] == 0
    assert not run.events("fault")
    assert "starts after step 0" in run.printed(1)


def test_killed_workers_cost_a_generation_each_and_nothing_else(counting: Counting, rounds: int):
    steps = 25 + 15 * rounds
    run = counting(steps=steps, resilience={"give_up_after_same_step": 9}).start()
    chance = random.Random(rounds)
    for kill in range(rounds):
        run.reach(8 + 15 * kill)
        wait_for(lambda kill=kill: len(run.events("recovered")) >= kill, "recovery from the kill before")
        pids = wait_for(lambda: len(found := run.workers()) == 2 and found, "two workers")
        os.kill(pids[chance.randrange(2)], signal.SIGKILL)
    assert run.wait() == 0, run.output + run.logs()
    whole(run, steps)
    faults = run.events("fault")
    assert [fault["kind"] for fault in faults] == ["exit"] * rounds
    assert all(fault["detail"] == "SIGKILL" for fault in faults)
    assert len(run.events("recovered")) == rounds
    assert run.events("generation_started")[-1]["generation"] == rounds + 1
    found, events = account(run.events(), run.metrics()), run.events()
    assert found.rank_s == pytest.approx(2 * (events[-1]["t"] - events[0]["t"]), rel=0.005)
    assert [incident.fault_id for incident in found.incidents] == [fault["fault_id"] for fault in faults]
    assert all(incident.lost_steps is not None and incident.seconds["restart"] > 0 for incident in found.incidents)


def test_the_rank_that_was_killed_is_the_one_that_is_named(counting: Counting):
    run = counting(steps=80).start()
    for kill, rank in enumerate((1, 0)):
        run.reach(10 + 30 * kill)
        pids = wait_for(lambda: len(found := run.workers()) == 2 and found, "two workers")
        os.kill(pids[rank], signal.SIGKILL)
        wait_for(lambda kill=kill: len(run.events("recovered")) > kill, "recovery")
    assert run.wait() == 0
    assert [fault["ranks"] for fault in run.events("fault")] == [[1], [0]]


@pytest.mark.parametrize("ends", ["wraps", "cleans up", "exits"])
def test_a_rank_that_lost_its_peer_is_not_blamed_however_it_ends(counting: Counting, ends: str):
    """As torch's pipeline wraps the error, as a script's clean-up fails after it, as a script that catches it leaves."""
    run = counting("bereft", steps=6, args={"ends": ends})
    assert run.run() == 0, run.output + run.logs()
    assert [(fault["kind"], fault["ranks"], fault["detail"]) for fault in run.events("fault")] == [("exit", [1], "SIGKILL")]


def test_both_workers_killed_at_once_is_survived(counting: Counting):
    run = counting().start()
    run.reach(15)
    for pid in run.workers().values():
        os.kill(pid, signal.SIGKILL)
    assert run.wait() == 0
    whole(run, 60)


def test_an_exception_once_is_recovered_from(counting: Counting):
    run = counting(args={"raise_at": 15, "once": True})
    assert run.run() == 0
    whole(run, 60)
    (fault,) = run.events("fault")
    assert (fault["kind"], fault["ranks"], fault["step"]) == ("exception", [1], 15)
    assert "bad sample at step 15" in fault["evidence"]
    assert run.events("recovered")[0]["lost_steps"] == 4


def test_the_same_exception_three_times_gives_up_with_the_culprits_traceback(counting: Counting):
    run = counting(args={"raise_at": 15})
    assert run.run() == 70
    assert "ValueError: bad sample at step 15" in run.output
    assert "Connection closed by peer" not in run.output  # the victim's
    assert [event["name"] for event in run.events("action")] == ["restart_workers", "restart_workers", "give_up"]
    assert all(fault["ranks"] == [1] for fault in run.events("fault"))


def test_an_exit_with_a_status_is_a_fault(counting: Counting):
    run = counting(args={"exit_at": 15, "once": True})
    assert run.run() == 0
    assert run.events("fault")[0]["detail"] == "exit code 3"


def test_the_last_lines_of_its_log_explain_a_rank_that_left_without_an_exception(counting: Counting):
    words = "NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus."
    run = counting(args={"exit_at": 15, "once": True, "last_words": words})
    assert run.run() == 0
    (fault,) = run.events("fault")
    assert (fault["class"], fault["ranks"]) == ("node", [1])
    assert fault["detail"] == "exit code 3; a GPU has fallen off the bus (Xid 79)"
    assert fault["evidence"].endswith(words)


def test_the_restart_budget_ends_the_run(counting: Counting):
    run = counting(args={"raise_at": 15}, resilience={"max_restarts_per_hour": 1, "give_up_after_same_step": 9})
    assert run.run() == 70
    assert "max_restarts_per_hour" in run.output


@pytest.mark.parametrize("sig", [signal.SIGTERM, soaked(signal.SIGINT), signal.SIGUSR1])
def test_a_stop_signal_stops_all_ranks_at_one_step_and_the_next_run_goes_on_there(counting: Counting, sig):
    run = counting(steps=80, every_steps=1000).start()
    run.reach(12)
    run.signal(sig)
    assert run.wait() == 75, run.output + run.logs()
    (drain,) = run.events("drain")
    stopped_at = json.loads((run.run_dir / "state.json").read_text())["step"]
    assert drain["step"] == stopped_at == run.step()
    assert drain["signal"] == sig.name
    assert run.run() == 0
    assert run.events("generation_started")[-1]["resumed_step"] == stopped_at
    whole(run, 80)
    assert len(run.metrics()) == 80  # not one step twice


def test_stops_at_random_moments_part_no_ranks(counting: Counting, rounds: int):
    steps = 1000 + 1000 * rounds  # so many that it does not come to the end between two looks
    run = counting(steps=steps, every_steps=1000, args={"step_s": 0.001})
    chance = random.Random(rounds)
    for _ in range(rounds):
        run.start()
        run.reach(run.step() + chance.randrange(1, 30))
        run.signal(signal.SIGTERM)
        assert run.wait() == 75, run.output + run.logs()
    assert run.run() == 0
    assert len(run.metrics()) == steps


@pytest.mark.parametrize("stage", ["its agent starts", "its agent has started"])
def test_a_stop_during_the_start_leaves_nothing(counting: Counting, stage: str):
    run = counting(steps=80).start()
    started = "watching the links"
    wait_for(lambda: bool(regions(run)) if stage == "its agent starts" else started in run.logs(), stage)
    run.signal(signal.SIGTERM)
    assert run.wait() == 75, run.output + run.logs()
    assert not run.processes() and not regions(run)
    assert run.run() == 0
    whole(run, 80)


def test_a_driver_killed_at_any_moment_leaves_no_gap_and_no_double_in_the_metrics(counting: Counting, rounds: int):
    run = counting(steps=2000, every_steps=5, args={"step_s": 0.001})
    chance = random.Random(rounds)
    for _ in range(rounds):
        run.start()
        run.reach(run.step() + chance.randrange(20, 60))
        run.kill()
        wait_for(lambda: not run.processes(), "everything below the driver is gone", 10.0)
    run.start()
    wait_for(lambda: len(run.events("generation_started")) > rounds, "the last generation")
    run.reach(run.step() + 20)
    run.signal(signal.SIGTERM)
    assert run.wait() == 75
    whole(run, max(run.losses()))
    keys = [(line["generation"], line["step"]) for line in run.metrics()]
    assert len(set(keys)) == len(keys)
    assert not list(run.run_dir.glob(".spill/*"))
    assert not regions(run)


def test_an_agent_killed_at_any_moment_leaves_no_gap_and_no_double_in_the_metrics(counting: Counting, rounds: int):
    run = counting(steps=2000, every_steps=5, args={"step_s": 0.001}, resilience={"give_up_after_same_step": 99}).start()
    chance = random.Random(rounds)
    for kill in range(rounds):
        run.reach(run.step() + chance.randrange(20, 60))
        wait_for(lambda: run.agents().get(0), "the agent").kill()
        wait_for(lambda kill=kill: len(run.events("recovered")) > kill, "recovery")
    run.reach(run.step() + 20)
    run.signal(signal.SIGTERM)
    assert run.wait() == 75, run.output + run.logs()
    whole(run, max(run.losses()))
    keys = [(line["generation"], line["step"]) for line in run.metrics()]
    assert len(set(keys)) == len(keys)
    assert not list(run.run_dir.glob(".spill/*"))
    assert not regions(run)


def test_a_stop_before_the_first_step_loses_nothing(counting: Counting):
    run = counting().start()
    wait_for(lambda: run.events("run_started"), "the start")
    run.signal(signal.SIGTERM)
    assert run.wait() == 75
    assert run.run() == 0
    whole(run, 60)


def test_a_second_ctrl_c_stops_at_once(counting: Counting):
    run = counting(steps=1000, args={"deaf": True}).start()  # one rank never asks whether to stop
    run.reach(5)
    run.signal(signal.SIGINT)
    wait_for(lambda: "once more" in run._printed(), "the word on a second Ctrl-C")
    run.signal(signal.SIGINT)
    assert run.wait(patience_s=10) == 75


def test_a_drain_that_workers_do_not_follow_ends_at_its_deadline(counting: Counting):
    run = counting(steps=1000, args={"deaf": True}, resilience={"drain_s": 2.0}).start()
    run.reach(5)
    run.signal(signal.SIGTERM)
    assert run.wait(patience_s=30) == 75
    assert "took longer" in run.output


def test_a_worker_killed_while_stopping_ends_the_run_with_what_is_durable(counting: Counting):
    run = counting(steps=200, args={"deaf": True}).start()
    run.reach(12)
    run.signal(signal.SIGTERM)
    os.kill(run.workers()[1], signal.SIGKILL)
    assert run.wait() == 75
    durable = json.loads((run.run_dir / "state.json").read_text())["step"]
    assert 10 <= durable < 200 and durable % 10 == 0
    assert run.run() == 0
    whole(run, 200)


def test_a_killed_driver_leaves_no_process_and_the_next_run_goes_on(counting: Counting, rounds: int):
    steps = 45 + 25 * rounds
    run = counting(steps=steps)
    for kill in range(rounds):
        run.start()
        run.reach(max(15 + 25 * kill, run.step() + 1))
        assert len(run.processes()) >= 4  # agent, fork server, two workers
        run.kill()
        wait_for(lambda: not run.processes(), "everything below the driver is gone", 10.0)
    assert run.run() == 0
    whole(run, steps)


def test_a_killed_agent_is_started_again(counting: Counting):
    run = counting(steps=80).start()
    run.reach(12)
    agent = run.agents()[0]
    agent.kill()
    assert run.wait() == 0, run.output + run.logs()
    whole(run, 80)
    assert run.events("fault")[0]["kind"] == "node_lost"
    assert run.events("action")[0]["name"] == "replace_node"


def test_a_killed_fork_server_is_survived(counting: Counting):
    run = counting(steps=80).start()
    run.reach(12)
    server = next(p for p in run.processes() if p.name() == "forkserver")
    server.kill()
    assert run.wait() == 0, run.output + run.logs()
    whole(run, 80)


def test_what_a_worker_had_started_goes_with_it(counting: Counting):
    run = counting("with_children", steps=60).start()
    run.reach(12)
    pids = run.workers()
    children = psutil.Process(pids[0]).children() + psutil.Process(pids[1]).children()
    assert len(children) == 4
    os.kill(pids[0], signal.SIGKILL)
    wait_for(lambda: run.events("recovered"), "recovery")
    assert not [child for child in children if alive(child)]
    run.signal(signal.SIGTERM)
    run.wait()
    assert not run.processes()


def test_two_agents_on_one_machine_are_two_nodes(counting: Counting):
    run = counting(cluster={"nodes": 2, "procs_per_node": 1}, steps=80).start()
    run.reach(12)
    os.kill(run.workers()[1], signal.SIGKILL)
    wait_for(lambda: run.events("recovered"), "recovery")
    run.reach(run.step() + 5)
    run.agents()[1].kill()
    assert run.wait() == 0, run.output + run.logs()
    whole(run, 80)
    assert [fault["kind"] for fault in run.events("fault")] == ["exit", "node_lost"]
    assert [fault["nodes"] for fault in run.events("fault")] == [[1], [1]]


@pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED HERE: a name server of its own for a process needs root")
def test_a_name_server_that_never_answers_is_not_waited_for(counting: Counting, tmp_path: Path):
    (tmp_path / "resolv.conf").write_text("nameserver 10.99.0.1\n")
    there = "ip link set lo up && ip link add dns type veth peer name end && ip link set end up && ip link set dns up"
    there += " && ip addr add 10.99.0.2/24 dev dns && ip neigh add 10.99.0.1 lladdr 02:00:00:00:00:01 dev dns"
    run = counting(cluster={"nodes": 2, "procs_per_node": 1}, steps=200)
    run.within = ["unshare", "--net", "--mount", "sh", "-c"]
    run.within += [f'{there} && mount --bind {tmp_path}/resolv.conf /etc/resolv.conf && exec "$@"', "sh"]
    run.start().reach(1)
    assert run.wait() == 0, run.output + run.logs()
    whole(run, 200)
    assert not run.events("fault")


def test_a_second_driver_on_the_same_run_directory_is_refused(counting: Counting, tmp_path: Path):
    run = counting(steps=2000).start()
    run.reach(3)
    other = counting(steps=2000)
    assert other.run() == 69
    assert f"pid {run.process.pid}" in other.output
    run.signal(signal.SIGTERM)
    assert run.wait() == 75


def test_an_entry_point_that_does_not_exist_is_a_config_error(counting: Counting):
    run = counting("no_such_function")
    assert run.run() == 78
    assert "config.yaml:" in run.output
    assert "no_such_function" in run.output
    assert "Traceback" not in run.output


def test_every_rank_finds_the_environment_of_communication(counting: Counting, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NCCL_IB_TIMEOUT", "22")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    names = ["NCCL_IB_TIMEOUT", "NCCL_IB_RETRY_CNT", "GLOO_SOCKET_IFNAME", "TORCH_FR_DUMP_TEMP_FILE"]
    run = counting("tell_environment", args={"names": names}, network={"ib_retries": 6})
    assert run.run() == 0, run.output + run.logs()
    logs = run.run_dir / "logs" / "g1"
    for rank in range(2):
        found = json.loads(run.printed(rank))
        assert found == dict(zip(names, ["22", "6", "lo", f"{logs}/nccl_trace_rank_"], strict=True))


@pytest.mark.parametrize("asked", ["numa", "auto"])
def test_ranks_run_where_they_are_bound_with_all_their_threads(counting: Counting, asked: Mode):
    run = counting("tell_place", cluster={"binding": asked})
    assert run.run() == 0, run.output + run.logs()
    expected = of_this_node(asked, "cpu", Share(0, 2, 2))
    assert expected.bound == (asked == "numa"), "this machine tells its domains"
    for rank, place in enumerate(expected.ranks):
        found = json.loads(run.printed(rank))
        cpus = os.sched_getaffinity(0) if place is None else place.cpus
        assert all(frozenset(each) == cpus for each in found["threads"])
        if found["policies"]:  # the kernel tells
            assert found["policies"] == ["default" if place is None or place.memory is None else f"prefer:{place.memory}"]


@pytest.mark.parametrize(("network", "waits_s"), [({}, 120.0), ({"collective_timeout_s": 300.5}, 300.5)], ids=["auto", "given"])
def test_no_process_group_times_out_before_the_watchdog_has_spoken(counting: Counting, network: dict[str, float], waits_s: float):
    run = counting("tell_timeouts", network=network, resilience={"hang_ceiling_s": 100.0})
    assert run.run() == 0, run.output + run.logs()
    for rank in range(2):
        found = json.loads(run.printed(rank))
        assert found == {"groups": [waits_s] * 3, "asked": waits_s}


def test_a_script_that_knows_five_calls_is_restarted_and_goes_on_where_it_was(campaign: Callable[..., Campaign], tmp_path: Path):
    script = Path(__file__).parents[2] / "examples/plain_pytorch.py"
    states = tmp_path / "states with a space"
    run = campaign(
        entrypoint=f"{script} '{states}' 60", cluster={"procs_per_node": 2, "device": "cpu"}, train={"steps": 60}
    ).start()
    run.reach(12)
    os.kill(run.workers()[1], signal.SIGKILL)
    assert run.wait() == 0, run.output + run.logs()
    (fault,) = run.events("fault")
    assert (fault["kind"], fault["ranks"]) == ("exit", [1])
    assert run.events("generation_started")[1]["resumed_step"] >= 10
    assert all(len(values) == 1 for values in run.losses().values()) and len(run.losses()) == 60
    assert (states / "step-00000060").is_dir()


def test_a_script_without_any_call_is_restarted_too(campaign: Callable[..., Campaign], tmp_path: Path):
    (tmp_path / "plain.py").write_text(PLAIN)
    run = campaign(entrypoint="plain.py 3", cluster={"procs_per_node": 2, "device": "cpu"})
    assert run.run() == 0, run.output + run.logs()
    assert [fault["detail"] for fault in run.events("fault")] == ["exit code 3"] and run.events("fault")[0]["ranks"] == [1]
    assert "the second time" in run.printed(0, 2)


PLAIN = """
import os, sys, time
from pathlib import Path

first = not Path("been-here").exists()
if first and os.environ["RANK"] == "1":
    time.sleep(0.5)
    Path("been-here").touch()
    sys.exit(int(sys.argv[1]))
time.sleep(60 if first else 0.1)
print("the second time")
"""


@pytest.mark.parametrize(
    ("entrypoint", "said"), [("nowhere.py", "nowhere.py cannot be read: No such file"), ("broken.py 1", "broken.py is not Python")]
)
def test_a_script_that_cannot_run_is_a_config_error(campaign: Callable[..., Campaign], tmp_path: Path, entrypoint: str, said: str):
    (tmp_path / "broken.py").write_text("def f(:\n")
    run = campaign(entrypoint=entrypoint, cluster={"procs_per_node": 2, "device": "cpu"})
    assert run.run() == 78, run.output
    assert said in run.output and "entrypoint" in run.output


def test_an_error_before_the_first_step_gives_up_soon(counting: Counting):
    run = counting("no_such_module")
    assert run.run() == 70
    assert "a_module_that_is_not_there" in run.output


def test_workers_killed_again_while_they_recover_are_recovered_again(counting: Counting, rounds: int):
    run = counting(steps=60, resilience={"give_up_after_same_step": 99}).start()
    run.reach(12)
    killed: set[int] = set()
    for _ in range(2 * rounds):
        pids = wait_for(lambda: [pid for pid in run.workers().values() if pid not in killed], "a worker that is new")
        os.kill(pids[0], signal.SIGKILL)
        killed.add(pids[0])
    assert run.wait() == 0, run.output + run.logs()
    whole(run, 60)
    assert len(run.events("fault")) >= rounds  # two that fall within one generation are one fault
    assert {event["fault_id"] for event in run.events("recovered")} == {event["fault_id"] for event in run.events("fault")}


def test_an_agent_without_word_from_its_driver_ends_its_workers(counting: Counting):
    run = counting(steps=120, resilience={"fence_s": 2.0}).start()
    run.reach(12)
    run.signal(signal.SIGSTOP)
    wait_for(lambda: not run.workers(), "the fence", 20.0)
    run.signal(signal.SIGCONT)
    assert run.wait() == 0, run.output + run.logs()
    whole(run, 120)
    assert "fenced" in (run.run_dir / "logs/agent0.log").read_text()
    assert [fault["kind"] for fault in run.events("fault")] == ["node_lost"]


def test_an_agent_that_is_stopped_is_replaced(counting: Counting):
    run = counting(steps=120, resilience={"fence_s": 1.0}).start()
    run.reach(12)
    agent = run.agents()[0]
    agent.suspend()
    assert run.wait() == 0, run.output + run.logs()
    whole(run, 120)
    assert "silent for" in run.events("fault")[0]["detail"]
    assert not alive(agent)


def test_a_full_disk_under_the_fence_ends_the_run_and_says_so(counting: Counting):
    run = counting()
    fence = run.run_dir / "checkpoints/.fence"
    fence.parent.mkdir(parents=True)
    fence.write_text("nonsense")  # what a disk that was full once may have left
    assert run.run() == 69
    assert str(fence) in run.output
    assert "Traceback" not in run.output


def test_agents_that_wait_for_the_preparation_are_not_taken_for_dead(counting: Counting):
    # Twice as long as an agent may be silent.
    run = counting(steps=5, args={"prepare_s": 14.0}, resilience={"fence_s": 2.0})
    assert run.run() == 0, run.output + run.logs()
    assert not run.events("fault")


@pytest.mark.parametrize("sig", [signal.SIGTERM, soaked(signal.SIGUSR1)])
def test_a_stop_that_also_reaches_the_processes_of_a_node_that_starts_up_is_no_failure(counting: Counting, sig: signal.Signals):
    run = counting(steps=5, args={"prepare_s": 3.0}).start()
    hit: set[str] = set()
    while not run.metrics():  # as Slurm does, to every process of a job
        for process in run.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                name = process.name()  # once: a process that was just forked takes a name of its own
                if name in ("agent", "template", "forkserver", "prepare") and name not in hit:
                    hit.add(name)
                    process.send_signal(sig)
        assert run.process.poll() is None, run._printed() + run.logs()
        if run.events("generation_started"):
            break
    assert hit == {"agent", "template", "forkserver", "prepare"}
    run.wait()
    assert not run.events("fault")


def test_a_node_that_dies_while_it_prepares_is_followed_by_another(counting: Counting, tmp_path: Path):
    done = tmp_path / "prepared"  # no second preparation is seen unless the first one lasts until its node is killed
    run = counting(cluster={"nodes": 2, "procs_per_node": 1}, steps=5, args={"prepare_until": str(done)}).start()

    def preparing() -> psutil.Process | None:
        with contextlib.suppress(psutil.NoSuchProcess):
            return next((each for each in run.processes() if each.name() == "prepare"), None)
        return None

    first = wait_for(preparing, "the preparation")
    wait_for(lambda: set(run.agents()) == {0, 1}, "the agents")
    run.agents()[0].kill()
    wait_for(lambda: not first.is_running(), "the end of the process")
    again = wait_for(preparing, "the preparation on the other node")
    assert run.agents()[1] in again.parents()
    done.touch()
    assert run.wait() == 0, run.output + run.logs()
    whole(run, 5)


def test_a_preparation_that_is_killed_ends_the_run_and_says_so(counting: Counting):
    run = counting(steps=5, args={"prepare_s": 30.0}).start()
    wait_for(lambda: [each for each in run.processes() if each.name() == "prepare"], "the preparation")[0].kill()
    assert run.wait() == 70
    assert "the preparation of toys:count ended with exit code -9" in run.output


def test_a_driver_whose_run_directory_was_taken_over_stops_at_once_and_writes_no_more(counting: Counting):
    run = counting(steps=100_000).start()
    run.reach(5)
    (run.run_dir / ".lease").write_text(
        json.dumps({"host": "n7", "pid": 4711, "job": "42", "machine": "another", "token": "other"})
    )
    assert run.wait() == 69
    assert "was taken over by pid 4711 on n7 (job 42)" in run.output
    assert not run.events("run_finished")
    assert "4711" in (run.run_dir / ".lease").read_text()
    wait_for(lambda: not run.processes(), "the end of all its processes")


def test_a_stop_that_every_process_of_the_job_is_sent_is_one_stop(counting: Counting):
    """A scheduler signals them all: snapshot daemon, fork server, standbys and workers leave it to the driver."""
    run = counting(steps=100_000, every_steps=1000).start()
    run.reach(12)
    agents = {process.pid for process in run.agents().values()}
    for process in run.processes():
        if process.pid not in agents:
            process.send_signal(signal.SIGTERM)
    run.reach(run.step() + 5)
    run.signal(signal.SIGTERM)
    assert run.wait() == 75, run.output + run.logs()
    assert not run.events("fault")
    assert "the snapshot daemon (process" not in run.logs()
    assert json.loads((run.run_dir / "state.json").read_text())["step"] == run.step()
