"""Site profiles: what a config takes over from its site, and what it does not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from resilient.campaign import communication
from resilient.config import ConfigError, dump, from_site, layout, load
from resilient.config.profile import fill, names
from resilient.plan import runtime_layout, show, training
from resilient.slurm.allocation import Allocation
from resilient.slurm.script import script

ROOT = Path(__file__).parents[3]
JOB = Allocation("77", ("n1",), (4,), 0)


@pytest.fixture(autouse=True)
def me(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER", "me")


def write(tmp_path: Path, text: str, name: str = "config.yaml") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", names())
def test_every_profile_is_good_by_itself_and_loads_again_from_what_a_run_leaves(tmp_path: Path, name: str):
    config = load(write(tmp_path, f"slurm: {{profile: {name}}}\n"))
    assert load(write(tmp_path, dump(config), "again.yaml")) == config
    limit_min = config.slurm.limits_min.get(config.slurm.partition or "")
    assert (limit_min is None) == (name == "generic")
    assert config.slurm.minutes == limit_min


def test_what_is_written_wins_key_by_key_and_lists_as_a_whole(tmp_path: Path):
    text = "slurm: {profile: juwels-booster, partition: develbooster}\ncheckpoint: {every_steps: 7, tiers: [{name: a, path: /a}]}\n"
    config = load(write(tmp_path, text), ["slurm.hostname_suffix=x"])
    assert (config.slurm.partition, config.slurm.gres, config.slurm.hostname_suffix) == ("develbooster", "gpu:4", "x")
    assert config.slurm.minutes == 120  # of that partition
    assert (config.checkpoint.every_steps, [tier.name for tier in config.checkpoint.tiers]) == (7, ["a"])
    given = from_site(write(tmp_path, text), ["slurm.hostname_suffix=x"])
    assert given["slurm.gres"] == "gpu:4"
    assert not {"slurm.partition", "slurm.hostname_suffix", "checkpoint.tiers"} & given.keys()


def test_an_explicit_null_is_a_value_too(tmp_path: Path):
    assert load(write(tmp_path, "slurm: {profile: jureca, gres: null}\n")).slurm.gres is None


def test_a_time_beyond_the_partitions_limit_is_told_where_it_stands(tmp_path: Path):
    path = write(tmp_path, "slurm:\n  profile: juwels-booster\n  time_min: 1441\n")
    with pytest.raises(ConfigError, match=r"config.yaml:3: slurm.time_min = 1441: must be at most 1440, .*booster"):
        load(path)
    assert load(path, ["slurm.time_min=90"]).slurm.minutes == 90


def test_an_unknown_profile_is_told_with_those_there_are(tmp_path: Path):
    path = write(tmp_path, "slurm:\n  profile: juwels-boster\n")
    with pytest.raises(
        ConfigError, match=r"config.yaml:2: slurm.profile = juwels-boster: .*did you mean 'juwels-booster'\?.*jureca"
    ):
        load(path)
    process = subprocess.run(
        [sys.executable, "-m", "resilient", "plan", str(path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 78
    assert "generic, jureca, juwels-booster" in process.stderr
    with pytest.raises(ConfigError, match="there is no such file"):
        load(path, ["slurm.profile=sites/none.yaml"])


def test_a_profile_of_ones_own_is_a_file_and_what_is_wrong_in_it_is_told_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SITES", str(tmp_path))
    site = write(tmp_path, "slurm:\n  partition: gpu\n  environment: {UCX_TLS: all, N: 1}\n", "site.yaml")
    path = write(tmp_path, "slurm: {profile: $SITES/site.yaml, environment: {N: 2}}\n")
    config = load(path)
    assert config.slurm.environment == {"UCX_TLS": "all", "N": "2"}
    site.unlink()
    again = load(write(tmp_path, dump(config), "again.yaml"))  # where the profile may not be there
    assert (again.slurm.partition, again.slurm.environment) == ("gpu", config.slurm.environment)
    write(tmp_path, "slurm:\n  partition: gpu\n  gpus_per_node: none\n", "site.yaml")
    with pytest.raises(ConfigError, match=r"site.yaml:3: slurm.gpus_per_node = none: allowed: a whole number"):
        load(path)
    write(tmp_path, "slurm:\n  profile: jureca\n", "site.yaml")
    with pytest.raises(ConfigError, match=r"site.yaml:2: slurm.profile: a profile does not name another one"):
        load(path)


def test_filling_takes_over_only_what_is_missing():
    values = {"a": {"b": 1}, "x": [1]}
    assert fill(values, {"a": {"b": 2, "c": 3}, "x": [2], "y": {"z": 4}}) == {("a", "c"): 3, ("y", "z"): 4}
    assert values == {"a": {"b": 1, "c": 3}, "x": [1], "y": {"z": 4}}


def test_the_sites_variables_are_for_jobs_alone_and_give_way_to_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "N"):
        monkeypatch.delenv(name, raising=False)
    config = load(write(tmp_path, "slurm: {profile: juwels-booster, environment: {N: 2}}\n"))
    found = communication(config, JOB)
    assert (found["N"], found["NCCL_SOCKET_IFNAME"], found["GLOO_SOCKET_IFNAME"]) == ("2", "ib0", "ib0")
    assert communication(config, None).get("NCCL_SOCKET_IFNAME") is None
    assert "N" not in communication(config, None)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib1")
    assert "NCCL_SOCKET_IFNAME" not in communication(config, JOB)
    with pytest.raises(ConfigError, match="NCCL_IB_TIMEOUT"):
        communication(load(write(tmp_path, "slurm: {environment: {NCCL_IB_TIMEOUT: 50}}\n")), JOB)


def test_the_batch_script_loads_modules_before_the_setup_and_asks_for_what_the_site_gives(tmp_path: Path):
    config = load(write(tmp_path, "slurm: {profile: jureca, modules: [Python, CUDA], setup: [source venv/bin/activate]}\n"))
    text = script(config, tmp_path, arguments=["c.yaml"], python="python", directory=tmp_path)
    assert {"#SBATCH --partition=dc-gpu", "#SBATCH --time=1440", "#SBATCH --gres=gpu:4"} <= set(text.splitlines())
    assert "module load Python CUDA\nsource venv/bin/activate\n" in text


def test_plan_says_what_the_profile_gave(tmp_path: Path):
    path = write(tmp_path, f"run_dir: {tmp_path}/run\nslurm: {{profile: juwels-booster, gres: gpu:2}}\n")
    process = subprocess.run(
        [sys.executable, "-m", "resilient", "plan", str(path)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    assert "from the site profile juwels-booster" in process.stdout
    rows = dict(line.split(None, 1) for line in process.stdout.splitlines() if line.startswith("  ") and " " in line.strip())
    assert rows["slurm.partition"].strip() == "booster"
    assert "slurm.gres" not in rows
    assert "ram" in rows["checkpoint.tiers"]


@pytest.mark.parametrize("text", ["[rack1|rack2]", "[/b]", "[bold]x", "[red]"])
def test_plan_shows_values_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str
):
    monkeypatch.setenv("COLUMNS", "500")
    config = load(write(tmp_path, f"run_dir: '{tmp_path}/{text}'\ncluster: {{device: cpu}}\nentrypoint: 'json:loads'\n"))
    show(config, layout(config, cpu_count=1, gpu_count=0), {"slurm.constraint": text})
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["slurm.constraint", *text.split()] in lines and ["run", "directory", f"{tmp_path}/{text}"] in lines


def test_plan_says_of_a_script_nothing_that_only_a_config_decides(tmp_path: Path):
    config = load(write(tmp_path, f"run_dir: {tmp_path}/run\nentrypoint: train.py\n"))
    assert training(config, {}, ()) == {}
    assert training(load(tmp_path / "config.yaml", ["train.steps=1000"]), {}, ()) == {"steps": "1,000"}
    assert "global batch" not in runtime_layout(config, layout(config, cpu_count=1, gpu_count=0))
    assert {"steps", "precision", "learning rate"} <= training(load(write(tmp_path, "name: x\n")), {}, ()).keys()


@pytest.mark.parametrize(
    ("batch", "procs", "words"),
    [
        (16, 2, "16 samples = micro batch 4 × dp 2 × 2 accumulated"),
        (16, 6, "16 samples = 4 micro batches of 4: of 6 replicas, 4 compute one each and 2 none"),
        (64, 6, "64 samples = 16 micro batches of 4: of 6 replicas, 4 compute 3 each and 2 compute 2 each"),
        (32, 5, "32 samples = 8 micro batches of 4: of 5 replicas, 3 compute 2 each and 2 compute one each"),
        (8, 3, "8 samples = 2 micro batches of 4: of 3 replicas, 2 compute one each and 1 none"),
        (36, 5, "36 samples = 9 micro batches of 4: of 5 replicas, 4 compute 2 each and 1 computes one"),
    ],
)
def test_the_plan_says_who_computes_the_global_batch(tmp_path: Path, batch: int, procs: int, words: str):
    text = f"cluster: {{procs_per_node: {procs}}}\ntrain: {{global_batch_size: {batch}, micro_batch_size: 4}}\n"
    config = load(write(tmp_path, text))
    assert runtime_layout(config, layout(config, cpu_count=8, gpu_count=0))["global batch"] == words
