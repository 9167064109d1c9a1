"""A chain's first job on Slurm's commands: submitted once, or refused with nothing left behind."""

import asyncio
import errno
import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from chains import command, records
from rich.console import Console

from resilient.config import Config, ConfigError, load
from resilient.config.errors import shown
from resilient.driver.farewell import sequel
from resilient.exits import EnvironmentUnusable, Exit
from resilient.slurm import queue, succession
from resilient.slurm.succession import Succession, submit
from resilient.status import inspect, render
from resilient.watch.judgement import judge
from resilient.watch.look import look


def test_submitting_twice_at_once_and_again_gives_one_job(path: Path, slurm, tmp_path: Path):
    both = [command("submit", str(path)) for _ in range(2)]
    told = [process.communicate()[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], told
    again = command("submit", str(path))
    assert "in the queue already: 100 (pending); nothing was submitted\n" in again.communicate()[0]
    slurm.becomes("100", reason="JobHeldUser")
    held = command("submit", str(path))
    assert "100 (held); nothing was submitted; `scontrol release 100` lets it begin" in held.communicate()[0]
    (job,) = slurm.jobs()
    assert job["dependency"] == "singleton"
    assert f"#SBATCH --job-name={job['name']}" in (tmp_path / "run/job.sh").read_text()
    assert records(tmp_path / "run") == ["begun", "submitted"]


def test_a_dry_run_prints_the_script_and_touches_nothing(path: Path, slurm, tmp_path: Path):
    dry = command("submit", str(path), "train.steps=7", "--dry-run")
    told, _ = dry.communicate()
    assert told.startswith("#!/bin/bash\n#SBATCH --job-name=gpt-")
    assert told.rstrip().endswith(f"-m resilient run {path} train.steps=7")
    assert not slurm.jobs()
    assert not (tmp_path / "run").exists()


def moved(tmp_path: Path, path: Path) -> Path:
    there = tmp_path / "moved"
    there.mkdir()
    (there / "identity.json").write_text("{}")
    return path.rename(there / "config.yaml")


def with_a_module_that_hides_the_runtime(tmp_path: Path, path: Path) -> Path:
    (tmp_path / "resilient.py").touch()
    (tmp_path / "train.py").touch()
    path.write_text(f"{path.read_text()}entrypoint: {tmp_path}/train.py\n")
    return path


def with_a_sink_of_no_package(tmp_path: Path, path: Path) -> Path:
    path.write_text(f"{path.read_text()}logging: {{sinks: {{others: {{nobodys: {{}}}}}}}}\n")
    return path


def with_a_script_that_is_not_there(tmp_path: Path, path: Path) -> Path:
    path.write_text(f"{path.read_text()}entrypoint: {tmp_path}/nope.py --lr 1\n")
    return path


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (with_a_script_that_is_not_there, "entrypoint = {script}: there is no such file"),
        (moved, ": this config is of a run directory that was moved or copied to {tmp_path}/moved: move it back"),
        (with_a_module_that_hides_the_runtime, "entrypoint: {tmp_path}/resilient.py has the name of the runtime"),
        (with_a_sink_of_no_package, "logging.sinks.others.nobodys: no installed package has an entry point"),
    ],
    ids=["script", "moved", "hidden", "sink"],
)
@pytest.mark.parametrize("words", [("run",), ("submit",), ("submit", "--dry-run")], ids=" ".join)
def test_what_a_job_would_refuse_at_once_is_not_submitted(
    path: Path, slurm, tmp_path: Path, words: tuple[str, ...], broken: Callable[[Path, Path], Path], says: str
):
    file = broken(tmp_path, path)
    there = sorted(tmp_path.rglob("*"))
    process = command(*words, str(file))
    told, _ = process.communicate()
    assert process.returncode == Exit.CONFIG, told
    assert told.startswith(f"{file}:") and says.format(tmp_path=tmp_path, script=shown(tmp_path / "nope.py")) in told
    assert (slurm.jobs(), sorted(tmp_path.rglob("*"))) == ([], there)


def test_a_sink_whose_package_only_the_jobs_have_is_submitted(path: Path, slurm, tmp_path: Path):
    called = command("submit", str(with_a_sink_of_no_package(tmp_path, path)), "slurm.modules=[wandb]")
    assert (called.communicate()[0].count("is submitted as job 100"), called.returncode) == (1, 0)


@pytest.mark.parametrize(
    "words",
    [
        ("entrypoint={tmp_path}/nope.py", "slurm.setup=[cp train.py nope.py]"),
        ("entrypoint={tmp_path}/nope.py", "slurm.container={{image: {tmp_path}/torch.sif}}"),
        ("entrypoint={tmp_path}/of_nodes/nope.py",),
    ],
    ids=["setup", "container", "nodes"],
)
def test_a_script_that_only_the_jobs_may_have_is_submitted(path: Path, slurm, tmp_path: Path, words: tuple[str, ...]):
    (tmp_path / "torch.sif").touch()
    submit = command("submit", str(path), *(word.format(tmp_path=tmp_path) for word in words))
    assert (submit.communicate()[0].count("is submitted as job 100"), submit.returncode) == (1, 0)


def test_a_durable_tier_that_cannot_be_written_here_is_told_and_the_job_is_submitted_all_the_same(
    path: Path, slurm, tmp_path: Path
):
    """It may be mounted on compute nodes alone."""
    (tmp_path / "scratch").touch()
    tier = {"name": "durable", "path": str(tmp_path / "scratch/gpt")}
    path.write_text(path.read_text() + yaml.safe_dump({"checkpoint": {"tiers": [tier]}}))
    called = command("submit", str(path))
    told, _ = called.communicate()
    line = next(number for number, text in enumerate(path.read_text().splitlines(), 1) if text.endswith("/gpt"))
    warning = (
        f"{path}:{line}: checkpoint.tiers.0.path = {shown(tier['path'])}: cannot write {tmp_path}/scratch on this machine: Not a "
    )
    assert told.startswith(f"{warning}directory; a job ends with 69 if its nodes cannot either\ngpt is submitted as job 100"), told
    assert (called.returncode, len(slurm.jobs())) == (0, 1)


@pytest.mark.parametrize("code", [Exit.OK, Exit.GAVE_UP, Exit.STOPPED])
def test_a_campaign_that_is_submitted_while_a_job_of_its_stopped_chain_drains_goes_on_behind_it(
    path: Path, config: Config, going: Succession, slurm, code: Exit
):
    assert asyncio.run(going.ensure("100", 50)) == ""
    assert [job.job_id for job in asyncio.run(going.stop())] == ["100"]
    path.write_text(f"{path.read_text()}cluster: {{nodes: 1}}\n")
    (slurm.directory / "lossy").touch()  # the answer is lost, and the job found
    assert "102 (pending); nothing was submitted" in submit(load(path, []), [str(path)], dry_run=False)
    asyncio.run(queue.cancel("102"))
    told = submit(load(path, []), [str(path)], dry_run=False)
    assert told.startswith("gpt is submitted as job 103, which begins once job 100 has ended; `resilient status")
    assert asyncio.run(going.ensure("100", 50, 0.0)) == ""
    asyncio.run(going.ended("100", code))
    slurm.becomes("100", state="COMPLETED")
    assert [(job["id"], job["state"], job["dependency"]) for job in slurm.jobs("PENDING")] == [("103", "PENDING", "singleton")]
    slurm.becomes("103", state="RUNNING")
    assert going.started("103", 40) is None
    assert asyncio.run(going.ensure("103", 50)) == ""
    assert [(job["id"], job["dependency"]) for job in slurm.jobs("PENDING")] == [("104", "afterany:103,singleton")]


@pytest.mark.parametrize("code", [Exit.OK, Exit.GAVE_UP, Exit.STOPPED])
def test_a_campaign_that_is_submitted_while_the_last_job_of_its_chain_runs_goes_on_behind_it(
    path: Path, config: Config, going: Succession, slurm, code: Exit
):
    assert "slurm.max_jobs is 1" in asyncio.run(going.ensure("100", 1))
    slurm.deaf(2)  # it is tried again
    told = submit(config, [str(path)], dry_run=False)
    assert told.startswith("gpt is submitted as job 101, which begins once job 100 has ended; `resilient status"), told
    assert "101 (pending); nothing was submitted" in submit(config, [str(path)], dry_run=False)
    assert asyncio.run(going.ensure("100", 1, 0.0)) == ""
    asyncio.run(going.ended("100", code))
    slurm.becomes("100", state="COMPLETED")
    assert bool(slurm.jobs("PENDING")) == (code is Exit.STOPPED)
    slurm.becomes("101", state="RUNNING")
    assert going.started("101", 40) == (None if code is Exit.STOPPED else code)


def test_a_job_that_could_not_be_cancelled_makes_room_for_the_next_submission(
    path: Path, going: Succession, slurm, monkeypatch: pytest.MonkeyPatch
):
    """Its script may be an older one."""
    asyncio.run(going.ensure("100", 50))
    monkeypatch.setattr(succession, "END_PATIENCE_S", 0.01)
    slurm.deaf(99)
    asyncio.run(going.ended("100", Exit.GAVE_UP))
    slurm.deaf(0)
    slurm.becomes("100", state="COMPLETED")
    path.write_text(f"{path.read_text()}cluster: {{nodes: 1}}\n")
    assert submit(load(path, []), [str(path)], dry_run=False).startswith("gpt is submitted as job 102; ")
    assert [(job["id"], job["state"]) for job in slurm.jobs("PENDING", "CANCELLED")] == [("101", "CANCELLED"), ("102", "PENDING")]
    assert going.started("102", 40) is None


def test_a_submission_lets_a_job_begin_that_could_not_without_the_nodes_to_be_avoided(path: Path, config: Config, slurm):
    found = Succession.of(config)
    asyncio.run(found.begin(f"#!/bin/bash\n#SBATCH --job-name={found.name}\n"))
    (slurm.directory / "few").touch()
    asyncio.run(queue.exclude("100", ["n2", "n3"]))
    told = "ob 100 cannot begin (BadConstraints): `resilient submit` lets it"
    assert told in str(sequel(Exit.STOPPED, asyncio.run(found.inspect())))
    assert told in judge(look(config.run_dir, time.time())).text
    with (console := Console(width=120)).capture() as status:
        console.print(render(inspect(config.run_dir)))
    assert "BadConstraints: `resilient submit` lets it begin" in status.get()
    (slurm.directory / "few").unlink()
    path.write_text(f"{path.read_text()}cluster: {{nodes: 1}}\nslurm: {{extra: ['--exclude=n9']}}\n")
    assert submit(load(path, []), [str(path)], dry_run=False).endswith("nothing was submitted; Slurm tries job 100 again")
    assert [(job["id"], job["exclude"]) for job in slurm.jobs()] == [("100", "n9")]


def test_a_submission_whose_answer_is_lost_is_found_and_not_made_again(config: Config, slurm):
    slurm.lossy()
    found = Succession.of(config)
    job, there = asyncio.run(found.begin(f"#SBATCH --job-name={found.name}\n"))
    assert (job, [each.job_id for each in there]) == (None, ["100"])
    assert len(slurm.jobs()) == 1
    assert found.chain.over is None


def test_a_name_for_jobs_in_the_environment_makes_no_second_chain(config: Config, slurm, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SBATCH_JOB_NAME", "mine")
    found = Succession.of(config)
    jobs = [asyncio.run(found.begin(f"#!/bin/bash\n#SBATCH --job-name={found.name}\n"))[0] for _ in range(2)]
    assert jobs == ["100", None]
    assert [job["name"] for job in slurm.jobs()] == [found.name]


# As `squeue` says it on a machine that is given its configuration by the controller.
UNFETCHED = """\
squeue: error: _fetch_child: failed to fetch remote configs: Unable to contact slurm controller (connect failure)
squeue: error: _establish_configuration: failed to fetch config
squeue: fatal: Could not establish a configuration source
"""


def test_a_campaign_that_is_renamed_keeps_its_chain(path: Path, config: Config, slurm):
    path.write_text(f"{path.read_text()}cluster: {{nodes: 1}}\n")
    first = submit(load(path, []), [str(path)], dry_run=False)
    (job,) = slurm.jobs()
    path.write_text(path.read_text().replace("name: gpt", "name: gpt-lr2"))
    renamed = load(path, [])
    assert (first.split()[0], renamed.name) == ("gpt", "gpt-lr2")
    assert f"#SBATCH --job-name={job['name']}\n" in submit(renamed, [str(path)], dry_run=True)
    assert submit(renamed, [str(path)], dry_run=False) == "gpt-lr2 is in the queue already: 100 (pending); nothing was submitted"
    found = Succession.of_job(renamed, {"SLURM_JOB_NAME": job["name"]})
    assert found is not None and found.name == Succession.of(renamed).name == job["name"]
    asyncio.run(found.stop())
    assert submit(renamed, [str(path)], dry_run=False).startswith("gpt-lr2 is submitted as job 101")
    assert [each["name"] for each in slurm.jobs()] == 2 * [job["name"]]
    moved = renamed.model_copy(update={"run_dir": config.run_dir.rename(config.run_dir.with_name("moved"))})
    assert Succession.of(moved).name.startswith("gpt-lr2-")


@pytest.mark.parametrize(
    ("extra", "environ", "named"),
    [
        ("-M there", {}, "slurm.extra = "),
        ("--clusters=here,there", {}, "slurm.extra = "),
        ("", {"SBATCH_CLUSTERS": "there", "SLURM_CLUSTERS": "here"}, "environment: SBATCH_CLUSTERS = there"),
        ("", {"SLURM_CLUSTERS": "all"}, "environment: SLURM_CLUSTERS = all"),
        ("--clusters=Here", {"SBATCH_CLUSTERS": "there"}, None),  # the script's own wins
        ("", {"SBATCH_CLUSTERS": "here", "SLURM_CLUSTERS": "there"}, None),
    ],
)
def test_a_chain_is_submitted_on_the_cluster_that_is_asked_for_its_jobs_or_refused(
    path: Path, slurm, monkeypatch: pytest.MonkeyPatch, extra: str, environ: dict[str, str], named: str | None
):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    path.write_text(f"{path.read_text()}{yaml.safe_dump({'cluster': {'nodes': 1}, 'slurm': {'extra': [extra] * bool(extra)}})}")
    config = load(path, [])
    if named is None:
        assert submit(config, [str(path)], dry_run=False).startswith("gpt is submitted as job 100")
        return
    with pytest.raises(ConfigError, match=f"{named}.*: Slurm on this machine is of the cluster here, .*; submit on a machine of"):
        submit(config, [str(path)], dry_run=False)
    assert (slurm.jobs(), config.run_dir.exists()) == ([], False)


@pytest.mark.parametrize(("after", "job_id"), [("", "100"), ("; echo 7 days are left", "100"), (" >/dev/null", None)])
def test_the_job_is_what_sbatch_says_among_the_words_of_a_site(
    config: Config, slurm, tmp_path: Path, after: str, job_id: str | None
):
    (tmp_path / "bin/sbatch").rename(tmp_path / "sbatch")
    script = f"#!/bin/sh\necho '--> Verifying your allocation: 3 jobs...OK'\n{tmp_path}/sbatch \"$@\"{after}\n"
    (tmp_path / "bin/sbatch").write_text(script)
    (tmp_path / "bin/sbatch").chmod(0o755)
    found = Succession.of(config)
    job, there = asyncio.run(found.begin(f"#!/bin/bash\n#SBATCH --job-name={found.name}\n"))
    assert job == job_id
    assert [each.job_id for each in there] == ([] if job_id else ["100"])  # found in the queue, where sbatch has not told it
    assert len(slurm.jobs()) == 1


def test_a_file_system_without_locks_is_named(path: Path, slurm, monkeypatch: pytest.MonkeyPatch):
    def refuse(fd: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    path.write_text(f"{path.read_text()}cluster: {{nodes: 1}}\n")
    told = r"cannot write .*/run/chain\.lock: .*: its file system has no flock\(2\)"
    with monkeypatch.context() as patched, pytest.raises(EnvironmentUnusable, match=told):
        patched.setattr(fcntl, "flock", refuse)
        submit(load(path, []), [str(path)], dry_run=False)
    assert not slurm.jobs()


def test_a_controller_that_is_down_is_asked_again_where_the_configuration_comes_from_it(config: Config, slurm, monkeypatch):
    monkeypatch.setattr(succession, "PERSON_PATIENCE_S", 600.0)
    found = Succession.of(config)
    slurm.deaf(1, UNFETCHED)
    assert asyncio.run(found.begin(f"#!/bin/bash\n#SBATCH --job-name={found.name}\n")) == ("100", [])
    slurm.deaf(1, UNFETCHED)
    assert asyncio.run(found.stop()) == []
    (job,) = slurm.jobs()
    assert job["state"] == "CANCELLED"


def test_a_person_does_not_wait_for_ever_for_a_deaf_slurm(config: Config, slurm, monkeypatch):
    monkeypatch.setattr(succession, "PERSON_PATIENCE_S", 0.01)
    slurm.deaf(99)
    with pytest.raises(EnvironmentUnusable, match="Unable to contact slurm controller"):
        asyncio.run(Succession.of(config).begin(""))
    assert not slurm.jobs()


def test_without_slurm_nothing_is_left_behind(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    there = sorted(tmp_path.iterdir())
    called = command("submit", str(path), f"run_dir={tmp_path}/runs/chain")
    told, _ = called.communicate(timeout=120)
    assert (called.returncode, told) == (
        Exit.UNUSABLE,
        "resilient: Slurm is not to be had on this machine: there is no squeue on its PATH; submit on a machine that has Slurm, "
        f"such as a login node, or run the campaign here without it: resilient run {path} run_dir={tmp_path}/runs/chain\n",
    )
    assert sorted(tmp_path.iterdir()) == there


UNCONFIGURED = """\
squeue: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host
squeue: error: fetch_config: DNS SRV lookup failed
squeue: fatal: Could not establish a configuration source
"""


@pytest.mark.parametrize("there", [False, True], ids=["no run directory", "a run directory"])
def test_a_slurm_that_belongs_to_no_cluster_is_one_line_with_what_to_do(path: Path, slurm, tmp_path: Path, there: bool):
    if there:
        (tmp_path / "run").mkdir()
    (tmp_path / "bin/squeue").write_text(f"#!/bin/sh\ncat >&2 <<'EOF'\n{UNCONFIGURED}EOF\nexit 1\n")
    told, _ = (called := command("submit", str(path))).communicate(timeout=120)
    assert (called.returncode, told.count("\n")) == (Exit.UNUSABLE, 1), told
    assert "of no cluster: squeue: fatal: Could not establish a configuration source; submit on" in told
    assert told.endswith(f"resilient run {path}\n")


def test_what_slurm_says_in_several_lines_is_one(path: Path, slurm, tmp_path: Path):
    (tmp_path / "bin/sbatch").write_text("#!/bin/sh\nprintf 'sbatch: error: no account\\nsbatch: error: failed\\n' >&2; exit 1\n")
    told, _ = command("submit", str(path)).communicate(timeout=120)
    assert told == "resilient: sbatch: error: no account; sbatch: error: failed\n"


def test_a_refusal_is_told_at_once_with_slurms_own_words_and_leaves_nothing_behind(path: Path, slurm, tmp_path: Path):
    (tmp_path / "bin/sbatch").write_text("#!/bin/sh\necho 'sbatch: error: invalid partition specified: gone' >&2; exit 1\n")
    there = sorted(tmp_path.iterdir())
    called = command("submit", str(path), f"run_dir={tmp_path}/runs/chain")
    told, _ = called.communicate(timeout=120)
    assert (called.returncode, told) == (Exit.UNUSABLE, "resilient: sbatch: error: invalid partition specified: gone\n")
    assert sorted(tmp_path.iterdir()) == there


@pytest.mark.parametrize("over", [True, False], ids=["a chain is over", "there was none"])
def test_a_refused_submission_leaves_the_chain_as_it_was(config: Config, slurm, tmp_path: Path, over: bool):
    found = Succession.of(config)
    config.run_dir.mkdir()
    if over:
        asyncio.run(found.begin(f"#!/bin/bash\n#SBATCH --job-name={found.name}\n"))
        found.started("100", 0)
        slurm.becomes("100", state="COMPLETED")
        asyncio.run(found.ended("100", Exit.STOPPED))
        asyncio.run(found.stop())
    before = found.chain
    sbatch = (tmp_path / "bin/sbatch").read_text()
    (tmp_path / "bin/sbatch").write_text("#!/bin/sh\necho 'sbatch: error: invalid partition specified: gone' >&2; exit 1\n")
    with pytest.raises(EnvironmentUnusable, match="invalid partition"):
        asyncio.run(found.begin("#!/bin/bash\n"))
    assert found.chain == before and (before.over is Exit.STOPPED) is over
    assert (Succession.found(config.run_dir) is not None) is over
    assert records(config.run_dir)[-2:] == ["begun", "refused"]
    (tmp_path / "bin/sbatch").write_text(sbatch)
    assert asyncio.run(found.begin(f"#!/bin/bash\n#SBATCH --job-name={found.name}\n"))[0] == ("101" if over else "100")
    assert found.chain.over is None and found.chain.jobs == ()


def test_a_refusal_removes_nothing_that_was_there_before(config: Config, slurm, tmp_path: Path):
    (tmp_path / "bin/sbatch").write_text("#!/bin/sh\necho 'sbatch: error: invalid partition specified: gone' >&2; exit 1\n")
    config.run_dir.mkdir()
    with pytest.raises(EnvironmentUnusable, match="invalid partition"):
        asyncio.run(Succession.of(config).begin(""))
    assert config.run_dir.is_dir()


@pytest.mark.parametrize(
    "answer",
    ["echo 'sbatch: error: Socket timed out' >&2; exit 1", "touch {run}/mine; echo 'sbatch: error: no such account' >&2; exit 1"],
    ids=["no answer: there may be a job", "there is more than the submission has made"],
)
def test_a_run_directory_that_may_be_needed_is_left(config: Config, slurm, tmp_path: Path, monkeypatch, answer: str):
    monkeypatch.setattr(succession, "PERSON_PATIENCE_S", 0.01)
    (tmp_path / "bin/sbatch").write_text(f"#!/bin/sh\n{answer.format(run=config.run_dir)}\n")
    with pytest.raises(EnvironmentUnusable):
        asyncio.run(Succession.of(config).begin(""))
    assert {"logs", "job.sh", "chain.jsonl"} <= {path.name for path in config.run_dir.iterdir()}
