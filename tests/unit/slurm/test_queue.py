"""The answers of Slurm's commands, as Slurm 22.05 prints them."""

import asyncio
import os
import re
import sys
from datetime import datetime
from pathlib import Path

import pytest

from resilient.slurm import options, queue
from resilient.slurm.options import in_script, overriding
from resilient.slurm.queue import QueuedJob, environment, parse_allotted, parse_kill_wait, parse_nodes, parse_queue


def row(*words: str) -> str:
    return "".join(f"{word:<{width}}" for word, width in zip(words, (32, 24, 24, 24, 24, 48), strict=True))


def test_the_queue_is_read_oldest_job_first():
    text = "\n".join(
        [
            row("1042", "PENDING", "N/A", "N/A", "N/A", "Dependency"),
            row("999", "RUNNING", "2026-11-21T14:00:00", "N/A", "2026-11-21T13:00:00", "None"),
            row("1000", "RUNNING", "2026-11-21T14:00:00", "2026-11-21T13:59:00", "N/A", "None"),
            row("1001", "PENDING", "N/A", "N/A", "N/A", "(Nodes required for job are DOWN)"),
            "slurm_load_jobs error: something else",
        ]
    )
    end = datetime.fromisoformat("2026-11-21T14:00:00").timestamp()
    assert parse_queue(text) == [
        QueuedJob("999", "RUNNING", end, False, "None", end - 3600.0),
        QueuedJob("1000", "RUNNING", end, True, "None"),
        QueuedJob("1001", "PENDING", None, False, "(Nodes required for job are DOWN)"),
        QueuedJob("1042", "PENDING", None, False, "Dependency"),
    ]


@pytest.mark.parametrize("state", ["PENDING", "REQUEUED", "RUNNING", "COMPLETING"])
def test_a_job_that_waits_is_one_that_has_no_nodes(state):
    assert QueuedJob("1", state).waits == (state in ("PENDING", "REQUEUED"))


@pytest.mark.parametrize("word", ["N/A", "NONE", "Unknown", "Invalid"])
def test_no_time_limit_is_no_end(word):
    assert parse_queue(row("7", "RUNNING", word, "N/A", "N/A", "None"))[0].end_t is None


def test_the_sites_kill_wait_is_read():
    assert parse_kill_wait("KillOnBadExit           = 0\nKillWait                = 42 sec\n") == 42
    assert parse_kill_wait("slurm_load_ctl_conf error") is None


def test_a_new_job_inherits_nothing_that_slurm_told_the_old_one_of_itself():
    stays = {"SLURM_CONF": "/etc/s", "SBATCH_ACCOUNT": "a", "PATH": "/"}
    assert (
        environment({"SLURM_JOB_ID": "7", "SLURM_CPU_BIND": "x", "SRUN_CPUS_PER_TASK": "4", "SQUEUE_STATES": "RUNNING", **stays})
        == stays
    )


@pytest.mark.parametrize(
    ("state", "hosts", "headless"),
    [
        ("RUNNING", "n[1-2]", False),
        ("RUNNING", "n2", True),  # as scontrol shows a job with --no-kill of which n1 is down
        ("RUNNING", "n[10-12]", True),
        ("COMPLETING", "n2", False),
        ("PENDING", "(null)", False),
    ],
)
def test_a_job_without_its_batch_host_is_told_from_one_that_has_it(state: str, hosts: str, headless: bool):
    told = f"JobId=1 JobName=job.sh JobState={state} Reason=None Requeue=1 ReqNodeList=(null) NodeList={hosts} BatchHost=n1 Power="
    found = parse_allotted(told)
    assert found is not None
    assert (found.headless, found.requeue) == (headless, True)
    assert parse_allotted("slurm_load_jobs error: Invalid job id specified") is None
    assert parse_allotted(told.replace("BatchHost=n1", "")) is None  # of salloc


@pytest.mark.parametrize(
    ("first", "last", "headless"),
    [
        ("n[1-2]", "n[3-4]", False),
        ("n[1-2]", "n4", False),  # of the last component's nodes, the first is down; nothing of the job's is started by it
        ("n2", "n[3-4]", True),
    ],
)
def test_of_a_heterogeneous_job_the_component_with_the_batch_script_counts(first: str, last: str, headless: bool):
    told = "JobName=a JobState=RUNNING HetJobIdSet=7-8"
    lines = [
        f"JobId=7 HetJobId=7 HetJobOffset=0 {told} Requeue=1 NodeList={first} BatchHost=n1 Power=",
        f"JobId=8 HetJobId=7 HetJobOffset=1 {told} Requeue=0 NodeList={last} BatchHost=n3 Power=",
    ]
    for order in (lines, lines[::-1]):
        found = parse_allotted("\n".join(order) + "\n")
        assert found is not None
        assert (found.headless, found.requeue, found.batch_host) == (headless, True, "n1")
    assert parse_allotted(lines[1]) is None  # the job is over where Slurm has forgotten it


def test_states_of_nodes_are_read_with_their_flags():
    told = (
        "NodeName=n1 Arch=x86_64 CoresPerSocket=1 State=ALLOCATED+DRAIN ThreadsPerCore=1 Reason=State=DOWN soon [root@x]\n"
        "NodeName=n2 CoresPerSocket=1 State=DOWN+NOT_RESPONDING ThreadsPerCore=1\n"
        "NodeName=n3 CoresPerSocket=1 State=IDLE* ThreadsPerCore=1\nno line of a node\n"
    )
    assert parse_nodes(told) == {
        "n1": {"ALLOCATED", "DRAIN"},
        "n2": {"DOWN", "NOT_RESPONDING"},
        "n3": {"IDLE", "NOT_RESPONDING"},
    }


def test_a_variable_of_sbatch_wins_over_no_option_of_the_script_and_is_left_where_there_is_none():
    script = "#!/bin/sh\n#SBATCH --job-name=gpt-1\n#SBATCH -p booster --time=90\n#SBATCH --no-requeue\n#SBATCH --mem 1G # of all\n"
    wins = {"JOB_NAME": "mine", "PARTITION": "x", "TIMELIMIT": "1", "REQUEUE": "1", "MEM_PER_CPU": "1", "WAIT": "1"}
    stays = {"SBATCH_ACCOUNT": "a", "SBATCH_QOS": "q", "PATH": "/"}
    without = overriding(in_script(script))
    assert environment({**{f"SBATCH_{name}": value for name, value in wins.items()}, **stays}, without) == stays


@pytest.mark.parametrize(
    ("lines", "given"),
    [
        (["--comment -J", '--comment="-x n1"'], {"comment": ["-J", "-x n1"]}),
        (["-HW"], {"hold": [""], "wait": [""]}),
        (
            ["-HOJmine -k -sx n1"],
            {
                **{name: [""] for name in ("hold", "overcommit", "no-kill", "oversubscribe")},
                "job-name": ["mine"],
                "exclude": ["n1"],
            },
        ),
        (["-koff -G", "4"], {"no-kill": ["off"], "gpus": ["4"]}),
        (["--dist=cyclic --core- 2 --overc"], {"distribution": ["cyclic"], "core-spec": ["2"], "overcommit": [""]}),
        (
            ["--ex n1"],
            {name: ["n1"] for name in ("exclude", "exclusive", "export", "export-file", "external", "extra", "extra-node-info")},
        ),
        (["--nice -x n1 --requeue --exclusive=user"], {"nice": [""], "exclude": ["n1"], "requeue": [""], "exclusive": ["user"]}),
        (["--container-image=a.sqsh --no-such"], {"container-image": ["a.sqsh"], "no-such": [""]}),
        (["--hold --", "-W"], {"hold": [""]}),
    ],
)
def test_options_are_read_as_sbatch_reads_them(lines: list[str], given: dict[str, list[str]]):
    assert in_script("\n".join(f"#SBATCH {line}" for line in lines)) == given


def test_every_option_that_is_known_has_a_whole_name():
    known = options._ALONE | options._WITH_VALUE
    assert not [name for name in known if re.fullmatch("[a-z]+(-[a-z]+)*", name) is None]
    assert {"oom-kill-step", "gpus-per-socket", "ntasks-per-gpu", *options._LETTERS.values()} <= known


@pytest.mark.parametrize(
    ("line", "variables"),
    [
        ("-G 4", ["GPUS"]),
        ("--gpus=4", ["GPUS"]),
        ("-S2", ["CORE_SPEC", "THREAD_SPEC"]),
        ("-m cyclic", ["DISTRIBUTION"]),
        ("--distr=cyclic", ["DISTRIBUTION"]),
        ("-HO", ["OVERCOMMIT"]),
        ("--overc", ["OVERCOMMIT"]),
        ("--swi=2", ["REQ_SWITCH", "WAIT4SWITCH"]),
        ("--segm=4", ["SEGMENT_SIZE"]),
        ("-s", ["EXCLUSIVE"]),
        ("--bb=x", ["BURST_BUFFER"]),
        ("--cpu-f high", ["CPU_FREQ_REQ"]),
        ("-M one", ["CLUSTERS"]),
    ],
)
def test_a_variable_of_sbatch_wins_over_no_letter_and_no_shortened_name(line: str, variables: list[str]):
    without = overriding(in_script(f"#SBATCH {line}\n"))
    assert without >= {f"SBATCH_{name}" for name in variables}
    assert not without & {"SBATCH_ACCOUNT", "SBATCH_QOS", "SBATCH_PARTITION"}


@pytest.mark.parametrize(
    ("name", "calls"), [("a-node-with-a-long-name-as-sites-have-them-{:06}", 1), ("n{:06}.rack.partition.cluster.example.org", 3)]
)
def test_the_states_of_nodes_are_told_however_long_their_names_are_together(
    name: str, calls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The kernel starts no command with an argument of more than 131,071 bytes."""
    program, asked = tmp_path / "scontrol", tmp_path / "asked"
    program.write_text(
        f"#!{sys.executable}\n"
        "import sys\n"
        "from resilient.slurm.hosts import expand\n"
        f"with open({str(asked)!r}, 'a') as file:\n"
        "    print('asked', file=file)\n"
        "for name in expand(sys.argv[-1]):\n"
        "    print(f'NodeName={name} Arch=x86_64 State=MIXED+DRAIN ThreadsPerCore=2')\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    hosts = [name.format(number) for number in range(5_000)]
    found = asyncio.run(queue.node_states(hosts))
    assert found == dict.fromkeys(hosts, frozenset({"MIXED", "DRAIN"}))
    assert len(asked.read_text().splitlines()) <= calls
