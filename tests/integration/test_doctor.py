"""Nodes that are not fit: `resilient doctor` on real file systems that fail, and runs whose health check fails or hangs."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from campaigns import MOUNTS, PATIENCE_S, ROOT, Campaign, alive, wait_for
from soak import soaked

Counting = Callable[..., Campaign]
Volume = Callable[..., Path]

SMI = """#!/bin/sh
# Stands for nvidia-smi: one GPU, as the real one prints it.
{before}
case "$1" in
*ecc.errors*) echo "0, GPU-6fa3, NVIDIA A100-SXM4-80GB, {errors}, No, Not Active, Not Active, 34, 5" ;;
*) echo "0, GPU-6fa3, NVIDIA A100-SXM4-80GB" ;;
esac
"""


class Doctor:
    """What the command said."""

    def __init__(self, *arguments: object, within: tuple[str, ...] = (), **environ: str) -> None:
        command = [*within, sys.executable, "-m", "resilient", "doctor", *map(str, arguments)]
        environ = {**os.environ, "PYTHONPATH": f"{Path(__file__).parent}{os.pathsep}{ROOT}", **environ}
        # Its output ends with it, whatever it has to leave behind.
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        self.code, self.output, self.errors = done.returncode, done.stdout, done.stderr

    def findings(self) -> dict[str, dict[str, Any]]:
        return {finding["check"]: finding for finding in json.loads(self.output)["findings"]}

    def failed(self) -> set[str]:
        return {name for name, finding in self.findings().items() if finding["verdict"] == "fail"}


def config(directory: Path, *tiers: Path, **sections: Any) -> Path:
    """A config of two ranks with these tiers; the last one is durable."""
    path = directory / "config.yaml"
    named = [{"name": f"t{number}", "path": str(tier)} for number, tier in enumerate(tiers)]
    whole = {
        "run_dir": str(directory / "run"),
        "entrypoint": "toys:count",
        "cluster": {"procs_per_node": 2, "device": "cpu"},
        "checkpoint": {"tiers": named},
        **sections,
    }
    path.write_text(yaml.safe_dump(whole))
    return path


@pytest.mark.soak
def test_a_machine_that_is_well_passes_with_a_table(tmp_path: Path):
    said = Doctor(config(tmp_path, Path("/dev/shm"), tmp_path / "durable"))
    assert said.code == 0, said.output + said.errors
    assert "nothing failed" in said.output and "matmul 0-1" in said.output and "tier t1" in said.output
    assert not (tmp_path / "durable").exists()


def test_a_config_that_is_wrong_is_told_as_everywhere(tmp_path: Path):
    path = config(tmp_path, tmp_path / "durable")
    said = Doctor(path, "cluster.procs_per_nod=2")
    assert said.code == 78
    assert "procs_per_node" in said.errors


def test_the_command_does_not_import_torch():
    check = "import sys, resilient.health.doctor, resilient.health.node; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})


@pytest.mark.soak
@MOUNTS
def test_tiers_that_cannot_be_written_or_hang_in_the_kernel_or_are_too_small_are_named_with_the_reason(
    tmp_path: Path, volume: Volume
):
    read_only, full, crowded = (volume(mib=16, inodes=200) for _ in range(3))
    few_bytes, few_inodes, frozen = volume(mib=16, inodes=2000), volume(mib=900, inodes=100), volume()
    subprocess.run(["mount", "-o", "remount,ro", str(read_only)], check=True)
    for block in ("1M", "1k"):
        fill = ["dd", "if=/dev/zero", f"of={full / block}", f"bs={block}"]
        subprocess.run(fill, check=False, stderr=subprocess.DEVNULL)
    with contextlib.suppress(OSError):
        for number in range(300):
            (crowded / str(number)).touch()
    tiers = (read_only / "x", full / "x", crowded / "x", few_bytes, few_inodes, frozen, tmp_path / "durable")
    subprocess.run(["fsfreeze", "--freeze", str(frozen)], check=True)
    try:
        said = Doctor("--json", "--limit", 100, config(tmp_path, *tiers, entrypoint="trainer.main:train"))
    finally:
        subprocess.run(["fsfreeze", "--unfreeze", str(frozen)], check=True)
    assert said.code == 69, said.output + said.errors
    found = said.findings()
    assert said.failed() == {f"tier t{number}" for number in range(6)}
    assert f"{read_only} cannot be written: Read-only file system" in found["tier t0"]["text"]
    assert f"{full} cannot be written: no space is left" in found["tier t1"]["text"]
    assert f"{crowded} cannot be written: no inodes are left" in found["tier t2"]["text"]
    assert "MiB and must hold" in found["tier t3"]["text"]
    assert "inodes free and must hold" in found["tier t4"]["text"]
    assert "no answer within 20 s; its process was stuck in the kernel" in found["tier t5"]["text"]


def smi(directory: Path, *, before: str = "", errors: int = 0) -> dict[str, str]:
    """An environment in which there seems to be one GPU."""
    script = directory / "bin" / "nvidia-smi"
    script.parent.mkdir()
    script.write_text(SMI.format(before=before, errors=errors))
    script.chmod(0o755)
    return {"PATH": f"{script.parent}{os.pathsep}{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": "0"}


@pytest.mark.soak
def test_a_gpu_with_memory_errors_fails_and_so_does_one_that_torch_cannot_use(tmp_path: Path):
    said = Doctor("--json", **smi(tmp_path, errors=2))
    assert said.code == 69, said.output + said.errors
    found = said.findings()
    assert "2 uncorrected memory errors" in found["GPU 0"]["text"]
    assert found["GPUs"]["verdict"] == "ok"
    assert "torch sees 0 GPUs" in found["matmul 0"]["text"]


@pytest.mark.soak
def test_a_process_may_have_too_few_files_open_and_json_has_all_that_was_looked_at(tmp_path: Path):
    path = config(tmp_path, Path("/dev/shm"), tmp_path / "durable")
    said = Doctor("--json", path, "cluster.procs_per_node=1", within=("prlimit", "--nofile=200"))
    assert said.code == 69, said.output + said.errors
    assert said.failed() == {"open files"}
    found = said.findings()
    assert {"memory", "open files", "address", "tier t0", "tier t1", "clock", "matmul 0", "all-reduce 0"} <= found.keys()
    assert "matmul 1" not in found
    assert found["tier t1"]["measured"]["write_bytes_per_s"] > 0
    assert found["GPUs"]["verdict"] == "skip"
    assert not (tmp_path / "durable").exists()


# -- runs ----------------------------------------------------------------------------------------------------------------


def test_a_run_on_a_node_that_is_not_fit_ends_before_its_first_step_and_says_why(counting: Counting):
    run = counting()
    run.within = ["prlimit", "--fsize=1048576"]
    assert run.run() == 69, run.output + run.logs()
    assert "failed its health check: file size: a file may have 1.0 MiB" in run.output
    (fault,) = run.events("fault")
    assert (fault["kind"], fault["nodes"]) == ("node_lost", [0])
    assert not run.events("generation_started")
    assert run.events("health")[0]["findings"][0]["check"] == "file size"
    assert "Traceback" not in run.output + run.logs()


@pytest.mark.soak
def test_without_the_check_the_same_node_takes_part(counting: Counting):
    run = counting(steps=10)
    run.within = ["prlimit", "--nofile=200"]
    assert run.run("resilience.health_check=false") == 0, run.output + run.logs()
    assert not run.events("health")


@pytest.mark.soak
@pytest.mark.parametrize("stopped", [False, soaked(True)])
def test_a_check_that_hangs_is_ended_at_its_limit_or_when_the_run_is_stopped(counting: Counting, tmp_path: Path, stopped: bool):
    environ = smi(tmp_path, before=f"echo $$ > {tmp_path}/pid; exec sleep 600")
    run = counting(cluster={"device": "auto", "procs_per_node": 1}, resilience={"health_check": 600 if stopped else 8})
    run.within = ["env", *(f"{name}={value}" for name, value in environ.items())]
    run.start()
    wait_for((tmp_path / "pid").exists, "the check of the GPUs")
    run.processes()
    if stopped:
        run.signal(signal.SIGTERM)
    assert run.wait() == (75 if stopped else 69), run.output + run.logs()
    if not stopped:
        assert "GPUs: no answer within 8 s" in run.output
    wait_for(lambda: not any(alive(process) for process in run.family.values()), "the end of all processes")
    wait_for(lambda: not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists(), "the end of nvidia-smi")


LFS = """#!/bin/sh
# Stands for Lustre's tool: a user whose quota is nearly used up, in bytes or in files.
[ "$1" = quota ] || exit 1
echo "Disk quotas for usr alice (uid 4711):"
echo "     Filesystem  kbytes   quota   limit   grace   files   quota   limit   grace"
echo "       /scratch  1000000       0 {limit_kib}       -   500       0  {files}       -"
"""


@pytest.mark.soak
@pytest.mark.parametrize(
    ("limit_kib", "files", "fits"), [(1_000_100, 0, False), soaked(0, 501, False), soaked(999_000_000, 900_000, True)]
)
def test_checkpoints_that_a_quota_has_no_room_for_are_told(tmp_path: Path, limit_kib: int, files: int, fits: bool):
    programs, scratch = tmp_path / "bin", tmp_path / "scratch"
    programs.mkdir()
    scratch.mkdir()
    (programs / "lfs").write_text(LFS.format(limit_kib=limit_kib, files=files))
    (programs / "lfs").chmod(0o755)
    path = config(tmp_path, scratch / "checkpoints", entrypoint="trainer.main:train")
    environ = {"PATH": f"{programs}:{os.environ['PATH']}", "SCRATCH": str(scratch), "COLUMNS": "400", "PYTHONPATH": str(ROOT)}
    plan = subprocess.run(
        [sys.executable, "-m", "resilient", "plan", str(path)],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    rows = {line.split("  ")[1]: line for line in plan.splitlines() if line.startswith("  ")}
    assert ("the quota of user alice leaves" in rows["t0 (durable)"]) and ("NOT ENOUGH" in rows["t0 (durable)"]) != fits, plan
    assert "the quota of user alice leaves" in rows["$SCRATCH"]
    doctor = Doctor(path, "--json", **environ)
    assert ("tier t0" in doctor.failed()) != fits
    assert doctor.code == (0 if fits else 69), doctor.output
    assert "the quota of user alice leaves" in doctor.findings()["tier t0"]["text"]
    assert doctor.findings()["tier $SCRATCH"]["verdict"] == ("ok" if fits else "warn")
