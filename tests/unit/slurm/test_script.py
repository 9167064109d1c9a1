"""The batch script of a chain."""

import subprocess
from pathlib import Path

import pytest

from resilient.config import Config, ConfigError
from resilient.slurm.script import job_name, script


def config(**slurm: object) -> Config:
    cluster = {"nodes": 3, "spares": 1}
    return Config.model_validate({"name": "gpt", "run_dir": "run", "cluster": cluster, "slurm": slurm})


def text(run_dir: str = "/scratch/run", **slurm: object) -> str:
    return script(
        config(**slurm), Path(run_dir), arguments=["c.yaml", "args.a=b c"], python="/v/bin/python", directory=Path("/home/me")
    )


def options(of: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in of.splitlines() if line.startswith("#SBATCH ")]


def test_the_script_asks_for_what_the_config_says_and_for_nothing_else():
    plain = options(text())
    assert {"--nodes=4", "--ntasks-per-node=1", "--no-kill", "--no-requeue", "--open-mode=append", "--chdir=/home/me"} <= set(plain)
    assert not [
        each for each in plain if each.startswith(("--time", "--gres", "--partition", "--account", "--qos", "--constraint"))
    ]
    asked = {
        "time_min": 90,
        "partition": "booster",
        "account": "a1",
        "qos": "long",
        "constraint": "a&b",
        "gres": "gpu:4",
        "gpus_per_node": 4,
        "cpus_per_node": 48,
        "requeue": True,
        "extra": ["--mail-type=FAIL"],
    }
    given = set(options(text(**asked)))
    assert {"--time=90", "--partition=booster", "--account=a1", "--qos=long", '--constraint="a&b"', "--gres=gpu:4"} <= given
    assert {"--gpus-per-node=4", "--cpus-per-task=48", "--requeue", "--mail-type=FAIL"} <= given
    assert "--no-requeue" not in given


@pytest.mark.parametrize(
    ("slurm", "lead"), [({}, 60), ({"time_min": 1440}, 60), ({"time_min": 1}, 15), ({"time_min": 1, "signal_lead_s": 20}, 20)]
)
def test_the_signal_comes_to_the_driver_alone_as_long_ahead_of_the_limit_as_a_drain_may_take(slurm, lead):
    assert f"--signal=B:USR1@{lead}" in options(text(**slurm))


def test_the_command_takes_the_shells_place_after_the_setup(tmp_path: Path):
    """bash runs it: what is exec'd has the shell's process id, the words of the arguments, and what the setup has made."""
    told = tmp_path / "told"
    program = tmp_path / "py thon"
    program.write_text(f'#!/bin/sh\nprintf "%s\\n" $$ "$MODULE" "$RESILIENT_CHAIN" "$@" > {told}\nexit 75\n')
    program.chmod(0o755)
    written = script(
        config(setup=["export MODULE=loaded"], python=str(program)),
        tmp_path,
        arguments=["c.yaml", "args.a=b c"],
        python="/nowhere",
        directory=tmp_path,
    )
    path = tmp_path / "job.sh"
    path.write_text(written)
    process = subprocess.Popen(["bash", str(path)])
    assert process.wait() == 75
    assert told.read_text().splitlines() == [
        str(process.pid),
        "loaded",
        str(tmp_path),
        "-m",
        "resilient",
        "run",
        "c.yaml",
        "args.a=b c",
    ]


def test_percent_signs_and_blanks_in_the_run_directory_are_its_own():
    assert '--output="/s/100%% new/logs/job-%j.out"' in options(text("/s/100% new"))


def test_a_run_directory_has_one_name_and_another_one_another():
    assert job_name(config(), Path("/a")) == job_name(config(time_min=5), Path("/a")) != job_name(config(), Path("/b"))
    assert f"--job-name={job_name(config(), Path('/scratch/run'))}" in options(text())


def test_a_job_is_not_asked_for_without_a_number_of_nodes():
    whatever = Config.model_validate({"cluster": {"nodes": "auto"}})
    with pytest.raises(ConfigError, match=r"cluster.nodes = auto: .*allowed: a number"):
        script(whatever, Path("/run"), arguments=[], python="p", directory=Path("/"))


def test_a_job_is_not_asked_for_to_run_on_its_first_node_alone():
    alone = Config.model_validate({"cluster": {"launcher": "local", "nodes": 2}})
    with pytest.raises(ConfigError, match=r"cluster.launcher = local: a job's agents run on its nodes; allowed: auto, slurm"):
        script(alone, Path("/run"), arguments=[], python="p", directory=Path("/"))


@pytest.mark.parametrize(
    ("extra", "why"),
    [
        (["--job-name=mine"], "--job-name would break the chain: .* set `name`"),
        (["--mem=1G", "-J mine"], "--job-name would break the chain"),
        (["--job=mine"], "--job-name would break the chain"),
        (["-p lab --array 0-3"], "--array would break the chain: .* a run_dir of its own"),
        (["-W"], "--wait would break the chain"),
        (["-HW"], "--wait would break the chain"),
        (["--comment", "-x", "-HJ mine"], "--job-name would break the chain"),
        (["--mem=1G\n#SBATCH --array=0-3"], "--array would break the chain"),
        (["--dependency=afterok:1?afterok:2"], "allowed: conditions with commas between"),
    ],
)
def test_an_option_that_would_break_the_chain_is_refused(extra: list[str], why: str):
    with pytest.raises(ConfigError, match=rf"slurm.extra = .*{why}"):
        text(extra=extra)


def test_options_that_only_look_like_those_are_taken():
    taken = ["--wait-all-nodes=1", "--comment='-J and --array'", "--comment -W", '--comment="-J"', "-d afterok:28"]
    assert set(taken) <= set(options(text(extra=taken)))
