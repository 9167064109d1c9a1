"""Runs of a toy from start to end: what ranks find there, what may be an entry point, and what a node prepares first."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import pytest
from campaigns import HELD, Campaign, wait_for, whole
from scripts import PACED
from soak import soaked

from resilient.agent import memory
from resilient.placement.applied import of_this_node
from resilient.placement.binding import Mode, Share
from resilient.version import commit

Counting = Callable[..., Campaign]


@pytest.mark.soak
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


@pytest.mark.soak
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


@pytest.mark.soak
def test_an_entry_point_that_does_not_exist_is_a_config_error(counting: Counting):
    run = counting("no_such_function")
    assert run.run() == 78
    assert "config.yaml:" in run.output
    assert "no_such_function" in run.output
    assert "Traceback" not in run.output


NAMES = ["NCCL_IB_TIMEOUT", "NCCL_IB_RETRY_CNT", "GLOO_SOCKET_IFNAME", "TORCH_FR_DUMP_TEMP_FILE"]
SETTINGS: dict[str, dict[str, Any]] = {
    "bound to domains": {"cluster": {"binding": "numa"}},
    "faults allowed": {"cluster": {"binding": "auto"}, "network": {"collective_timeout_s": 300.5}, "chaos": {"allow": True}},
}
EACH = pytest.mark.parametrize("setting", ["bound to domains", soaked("faults allowed")])
Told = Callable[[str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """What the ranks of a run find, once per setting; the run directory is `run_dir`."""
    made: dict[str, list[dict[str, Any]]] = {}

    def tell(setting: str) -> list[dict[str, Any]]:
        if setting not in made:
            config = SETTINGS[setting]
            run = Campaign(
                tmp_path_factory.mktemp("told"),
                entrypoint="toys:tell",
                args={"names": NAMES},
                resilience={"hang_ceiling_s": 100.0},
                **{
                    **config,
                    "cluster": {"procs_per_node": 2, "device": "cpu", **config["cluster"]},
                    "network": {"ib_retries": 6, **config.get("network", {})},
                },
            )
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("NCCL_IB_TIMEOUT", "22")
                patch.delenv("GLOO_SOCKET_IFNAME", raising=False)
                assert run.run() == 0, run.output + run.logs()
            made[setting] = [json.loads(run.printed(rank).splitlines()[-1]) | {"run_dir": run.run_dir} for rank in range(2)]
        return made[setting]

    return tell


@EACH
def test_every_rank_finds_the_environment_of_communication(told: Told, setting: str):
    for found in told(setting):
        logs = found["run_dir"] / "logs" / "g1"
        assert found["environment"] == dict(zip(NAMES, ["22", "6", "lo", f"{logs}/nccl_trace_rank_"], strict=True))


@EACH
def test_ranks_run_where_they_are_bound_with_all_their_threads(told: Told, setting: str):
    asked: Mode = SETTINGS[setting]["cluster"]["binding"]
    expected = of_this_node(asked, "cpu", Share(0, 2, 2))
    assert expected.bound == (asked == "numa"), "this machine tells its domains"
    for found, place in zip(told(setting), expected.ranks, strict=True):
        cpus = os.sched_getaffinity(0) if place is None else place.cpus
        assert all(frozenset(each) == cpus for each in found["threads"])
        if found["policies"]:  # the kernel tells
            assert found["policies"] == ["default" if place is None or place.memory is None else f"prefer:{place.memory}"]


@EACH
def test_no_process_group_times_out_before_the_watchdog_has_spoken(told: Told, setting: str):
    waits_s = SETTINGS[setting].get("network", {}).get("collective_timeout_s", 120.0)
    for found in told(setting):
        assert (found["groups"], found["asked"]) == ([waits_s] * 3, waits_s)


@EACH
def test_a_campaign_that_does_not_allow_faults_does_not_look_out_for_them(told: Told, setting: str):
    for found in told(setting):
        assert found["watcher"] == (None if "chaos" not in SETTINGS[setting] else "chaos.injectors.inside")


@EACH
def test_an_entry_point_that_says_what_to_import_ahead_gets_nothing_else(told: Told, setting: str):
    assert [found["ahead"] for found in told(setting)] == [False, False]


def test_a_script_that_knows_five_calls_is_restarted_and_goes_on_where_it_was(campaign: Callable[..., Campaign], tmp_path: Path):
    script = Path(__file__).parents[2] / "examples/plain_pytorch.py"
    states = tmp_path / "states with a space"
    run = campaign(
        entrypoint=f"{PACED} 0.0:50 {script} '{states}' 60",
        cluster={"procs_per_node": 2, "device": "cpu"},
        train={"steps": 60},
        resilience=HELD,
    ).start()
    run.reach(12)
    os.kill(run.workers()[1], signal.SIGKILL)
    run.go_on()
    assert run.wait() == 0, run.output + run.logs()
    (fault,) = run.events("fault")
    assert (fault["kind"], fault["ranks"]) == ("exit", [1])
    assert run.events("generation_started")[1]["resumed_step"] >= 10
    assert all(len(values) == 1 for values in run.losses().values()) and len(run.losses()) == 60
    assert (states / "step-00000060").is_dir()


@pytest.mark.soak
def test_a_script_without_any_call_is_restarted_too(campaign: Callable[..., Campaign], tmp_path: Path):
    (tmp_path / "plain.py").write_text(PLAIN)
    run = campaign(entrypoint="plain.py 3", cluster={"procs_per_node": 2, "device": "cpu"})
    assert run.run() == 0, run.output + run.logs()
    assert [fault["detail"] for fault in run.events("fault")] == ["exit code 3"] and run.events("fault")[0]["ranks"] == [1]
    assert "the second time True" in run.printed(0, 2)
    assert not memory.directories(run.run_dir)


PLAIN = """
import os, sys, time
from pathlib import Path
from typing import Any

first = not Path("been-here").exists()
if first and os.environ["RANK"] == "1":
    time.sleep(0.5)
    Path("been-here").touch()
    sys.exit(int(sys.argv[1]))
time.sleep(60 if first else 0.1)
print("the second time", "torch._dynamo" in sys.modules)  # which optimizers need
"""


@pytest.mark.parametrize(
    ("entrypoint", "said"),
    [soaked("nowhere.py", "nowhere.py: there is no such file"), ("broken.py 1", "broken.py is not Python")],
)
def test_a_script_that_cannot_run_is_a_config_error(campaign: Callable[..., Campaign], tmp_path: Path, entrypoint: str, said: str):
    (tmp_path / "broken.py").write_text("def f(:\n")
    run = campaign(entrypoint=entrypoint, cluster={"procs_per_node": 2, "device": "cpu"})
    assert run.run() == 78, run.output
    assert said in run.output and "entrypoint" in run.output


@pytest.mark.soak
def test_a_full_disk_under_the_fence_ends_the_run_and_says_so(counting: Counting):
    run = counting()
    fence = run.run_dir / "checkpoints/.fence"
    fence.parent.mkdir(parents=True)
    fence.write_text("nonsense")  # what a disk that was full once may have left
    assert run.run() == 69
    assert str(fence) in run.output
    assert "Traceback" not in run.output


@pytest.mark.soak
def test_agents_that_wait_for_the_preparation_are_not_taken_for_dead(counting: Counting):
    # Twice as long as an agent may be without its driver's word.
    run = counting(steps=5, args={"prepare_s": 14.0}, resilience={"fence_s": 7.0})
    assert run.run() == 0, run.output + run.logs()
    assert not run.events("fault")


@pytest.mark.soak
@pytest.mark.parametrize("sig", [signal.SIGTERM, soaked(signal.SIGUSR1)])
def test_a_stop_that_also_reaches_the_processes_of_a_node_that_starts_up_is_no_failure(
    counting: Counting, tmp_path: Path, sig: signal.Signals
):
    done, names = tmp_path / "prepared", {"agent", "template", "forkserver", "prepare"}
    run = counting(steps=5, args={"prepare_until": str(done)}).start()
    hit: set[str] = set()
    while not run.metrics():  # as Slurm does, to every process of a job
        for process in run.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                name = process.name()  # once: a process that was just forked takes a name of its own
                if name in names - hit:
                    hit.add(name)
                    process.send_signal(sig)
        if hit == names:
            done.touch()
        assert run.process.poll() is None, run._printed() + run.logs()
        if run.events("generation_started"):
            break
    assert hit == names
    run.wait()
    assert not run.events("fault")


@pytest.mark.soak
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


@pytest.mark.soak
@pytest.mark.parametrize(("kills", "status"), [(1, 0), (3, 70)])
def test_a_preparation_that_is_killed_is_made_again_twice(counting: Counting, tmp_path: Path, kills: int, status: int):
    done = tmp_path / "prepared"
    run = counting(steps=5, args={"prepare_until": str(done)}).start()
    killed: set[int] = set()

    def another() -> psutil.Process | None:
        return next((each for each in run.processes() if each.pid not in killed and each.name() == "prepare"), None)

    for _ in range(kills):
        process = wait_for(another, "the preparation")
        killed.add(process.pid)
        process.kill()
    done.touch()
    assert run.wait() == status, run.output + run.logs()
    assert run.output.count("the preparation of toys:count ended with exit code -9") == kills, run.output
    assert run.output.count("it is made again") == min(kills, 2), run.output


def test_a_job_goes_on_above_a_fence_that_is_ahead_of_its_ledger(counting: Counting):
    """Lines of a driver that died may lie in a spill file on another host, and the fence is on the durable tier."""
    run = counting(steps=10_000).start()
    run.reach(12)
    run.signal(signal.SIGTERM)
    assert run.wait() == 75, run.output + run.logs()
    saved = run.events("committed")[-1]["step"]
    (run.run_dir / "checkpoints/.fence").write_text("8\n")
    run.start().reach(saved + 20)
    run.signal(signal.SIGTERM)
    assert run.wait() == 75, run.output + run.logs()
    assert run.events("generation_started")[-1]["generation"] == 9
    assert run.events("committed")[-1]["step"] > saved


def test_a_run_directory_that_was_moved_is_not_begun_anew_in_its_old_place(counting: Counting, tmp_path: Path):
    run = counting(steps=10).start()
    assert run.wait() == 0, run.output + run.logs()
    moved = run.run_dir.rename(tmp_path / "moved")
    command = [sys.executable, "-m", "resilient", "run", str(moved / "config.yaml")]
    found = subprocess.run(command, check=False, capture_output=True, text=True)
    assert found.returncode == 78 and "was moved or copied" in found.stderr, found.stderr
    assert not run.run_dir.exists()
