"""Who may read what a campaign makes, whose files it obeys, and what `resilient doctor --security` says of that."""

import json
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest
from stranger import UID, needs_root, shared_place, stranger, stranger_for_a_while

from checkpoint.tools import flushing
from checkpoint.tools.refusal import Refusal
from resilient import access, storage
from resilient.agent import NAME, memory
from resilient.driver.lease import Owner
from resilient.exits import EnvironmentUnusable
from resilient.health import security
from resilient.lifeline import name_of, name_process
from resilient.processes import local_pid, must_be_run_directory
from resilient.slurm.launch import own_addresses


def described(name: str, root: Path) -> str:
    """What `storage.json` says of a campaign with this tier alone."""
    kind: storage.Kind = "durable" if name == "durable" else "memory"
    tier = storage.TierStorage(name, kind, name == "durable", (str(root),), 3, None, None, None, False, None)
    return json.dumps(asdict(storage.Storage("gpt", (tier,), 3, ())))


@pytest.fixture(autouse=True)
def _umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    made = tmp_path / "run"
    for path in (made, made / "checkpoints"):
        path.mkdir(mode=0o700)
    stored = described("durable", made / "checkpoints")
    files = {"config.yaml": "name: gpt\n", "storage.json": stored, "job.sh": "#!/bin/sh\n", "chain.jsonl": ""}
    for name, text in {**files, "events.jsonl": "", ".lease": "", ".lock": ""}.items():
        (made / name).write_text(text)
        (made / name).chmod(0o600)
    (made / "checkpoints" / storage.IDENTITY).write_text("gpt\n")
    return made


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# -- modes -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "directory", "file"), [("private", 0o700, 0o600), ("group", 0o750, 0o640)])
def test_a_run_directory_and_what_is_made_in_it_is_for_those_who_are_to_read_it(
    tmp_path: Path, kind: access.Mode, directory: int, file: int
) -> None:
    access.restrict(kind)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/weights").write_text("")
    assert (mode(tmp_path / "run"), mode(tmp_path / "run/weights")) == (directory, file)
    os.umask(0)
    access.restrict_as(tmp_path / "run")  # an agent, which sees the directory alone
    (tmp_path / "run/log").write_text("")
    assert mode(tmp_path / "run/log") == file


def test_a_run_directory_that_was_open_to_all_is_closed(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o755)
    access.close_to_others(tmp_path / "run", "private")
    assert mode(tmp_path / "run") == 0o700


@pytest.mark.parametrize(("kind", "wanted"), [("private", 0o2700), ("group", 0o2750)])
def test_a_run_directory_keeps_the_bit_by_which_files_have_the_projects_group(
    tmp_path: Path, kind: access.Mode, wanted: int
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(0o2770)
    access.close_to_others(tmp_path / "run", kind)
    assert mode(tmp_path / "run") == wanted


def test_a_campaign_that_was_private_opens_to_its_group_what_goes_on(
    run_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directories = [
        run_dir / "logs",
        run_dir / "data",
        run_dir / "logs/g1",
        run_dir / "checkpoints/step-00000001",
        tmp_path / "tier",
    ]
    for path in directories:
        path.mkdir(mode=0o700)
    ledger = [run_dir / "events.jsonl", run_dir / "metrics.jsonl.1", run_dir / "driver.log", tmp_path / "tier/.identity"]
    elsewhere = [tmp_path / "tier", tmp_path / "tier/.identity"]
    others = [run_dir / "notes.txt", run_dir / "logs/g1/rank0.log", tmp_path / "outside"]
    for path in (*ledger, *others):
        path.touch(mode=0o600)
    (run_dir / "driver.log.1").symlink_to(tmp_path / "outside")
    access.close_to_others(run_dir, "private", elsewhere)
    assert mode(run_dir / "events.jsonl") == 0o600 and not caplog.records
    access.close_to_others(run_dir, "group", elsewhere)
    opened = [run_dir, run_dir / "logs", run_dir / "data", run_dir / "checkpoints", tmp_path / "tier"]
    assert {mode(path) for path in opened} == {0o750}
    assert {mode(path) for path in (*ledger, run_dir / "chain.jsonl", run_dir / "storage.json")} == {0o640}
    assert {mode(path) for path in others} == {0o600} and mode(run_dir / "logs/g1") == 0o700
    assert [f"chmod -R g+rX {run_dir}" in record.getMessage() for record in caplog.records] == [True]
    access.close_to_others(run_dir, "group", elsewhere)
    assert len(caplog.records) == 1, "it is done once"


# -- whose files are obeyed --------------------------------------------------------------------------------------------------


def test_files_of_the_caller_are_obeyed(run_dir: Path) -> None:
    access.must_be_ours(run_dir / "config.yaml", run_dir, "private")
    assert flushing.newest(run_dir)[0] is None


@pytest.mark.parametrize("name", ["events.jsonl", "metrics.jsonl", ".lease", "identity.json"])
def test_a_pipe_in_place_of_a_file_is_refused_and_not_waited_for(run_dir: Path, name: str) -> None:
    (run_dir / name).unlink(missing_ok=True)
    os.mkfifo(run_dir / name, 0o600)
    with pytest.raises(EnvironmentUnusable, match=rf"{re.escape(name)} is a pipe, .*where a file is expected: move it away"):
        access.must_be_ours(None, run_dir, "private")


@pytest.mark.parametrize("name", ["metrics.jsonl", ".lease", ".lock", ".past"])
def test_no_command_that_reads_a_run_directory_waits_for_a_pipe_in_it(run_dir: Path, name: str) -> None:
    (run_dir / name).unlink(missing_ok=True)
    os.mkfifo(run_dir / name, 0o600)
    with pytest.raises(EnvironmentUnusable, match=rf"{re.escape(name)} is a pipe, .*where a file is expected: move it away"):
        must_be_run_directory(run_dir)


@needs_root
@pytest.mark.parametrize("name", ["config.yaml", "storage.json", "job.sh", "chain.jsonl", ".lease", ".spill"])
def test_a_control_file_of_somebody_else_is_refused_with_his_name(run_dir: Path, name: str) -> None:
    (run_dir / name).write_text("tiers: evil")
    os.chown(run_dir / name, UID, UID)
    with pytest.raises(EnvironmentUnusable, match=rf"{name} belongs to uid {UID}, and not to .*run_dir_mode: group"):
        access.must_be_ours(None, run_dir, "private")


@needs_root
@pytest.mark.parametrize("name", ["storage.json", ".lease", "config.yaml"])
def test_a_flush_refuses_control_files_of_somebody_else_and_says_how_to_allow_a_group(run_dir: Path, name: str) -> None:
    os.chown(run_dir / name, UID, os.getegid())
    with pytest.raises(Refusal, match=rf"{name} belongs to uid {UID}.*--group trusts"):
        flushing.newest(run_dir)
    assert flushing.newest(run_dir, group=True)[0] is None


@needs_root
def test_a_link_of_somebody_else_is_not_obeyed_whatever_it_leads_to(run_dir: Path) -> None:
    (run_dir / "job.sh").rename(run_dir / "mine.sh")
    (run_dir / "job.sh").symlink_to("mine.sh")
    access.must_be_ours(None, run_dir, "private")
    os.chown(run_dir / "job.sh", UID, UID, follow_symlinks=False)
    with pytest.raises(EnvironmentUnusable, match=r"job\.sh belongs to"):
        access.must_be_ours(None, run_dir, "private")


def test_what_others_may_write_is_not_obeyed(run_dir: Path) -> None:
    (run_dir / "job.sh").chmod(0o666)
    for kind in access.MODES:
        with pytest.raises(EnvironmentUnusable, match=r"job.sh may be written by everybody \(mode 0666\); chmod o-w it"):
            access.must_be_ours(None, run_dir, kind)


@needs_root
def test_a_group_is_trusted_where_the_config_says_so_and_the_caller_is_in_it(run_dir: Path) -> None:
    os.chown(run_dir / "chain.jsonl", UID, UID)
    for kind in access.MODES:  # not the caller's group
        with pytest.raises(EnvironmentUnusable, match=r"chain\.jsonl belongs to"):
            access.must_be_ours(None, run_dir, kind)
    os.chown(run_dir / "chain.jsonl", UID, os.getegid())
    (run_dir / "chain.jsonl").chmod(0o660)
    access.must_be_ours(None, run_dir, "group")


@needs_root
def test_the_command_line_refuses_a_config_of_somebody_else(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(f"name: gpt\nrun_dir: {tmp_path / 'run'}\n")
    os.chown(config, UID, UID)
    command = [sys.executable, "-m", "resilient", "submit", str(config), "--dry-run"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 69 and f"{config} belongs to uid {UID}" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


# -- doctor --security -------------------------------------------------------------------------------------------------------


def findings(run_dir: Path) -> dict[str, str]:
    return {finding.check: f"{finding.verdict}: {finding.text}" for finding in security.inspect(run_dir).findings}


def test_a_run_directory_in_order_is_ok(run_dir: Path) -> None:
    found = findings(run_dir)
    assert found["run directory"].startswith("ok") and found["control files"].startswith("ok")
    assert found["tier durable"].startswith("ok") and found["listeners"].startswith("skip")
    assert security.inspect(run_dir).ok


def test_what_is_open_is_told_with_what_to_do(run_dir: Path) -> None:
    run_dir.chmod(0o755)
    (run_dir / "job.sh").chmod(0o666)
    found = findings(run_dir)
    assert found["run directory"] == f"fail: {run_dir} has mode 0755, where run_dir_mode private allows 0700: chmod 700 it"
    assert "job.sh may be written by everybody (mode 0666); chmod o-w it" in found["control file job.sh"]
    assert not security.inspect(run_dir).ok
    assert mode(run_dir) == 0o755  # it changes nothing


@needs_root
def test_a_tier_of_somebody_else_is_told(run_dir: Path) -> None:
    with shared_place() as place:
        stranger('mkdir -m 0777 "$1" "$1/node0"', place / "gpt")
        (run_dir / "storage.json").write_text(described("ram", place / "gpt/node0"))
        assert f"it belongs to uid {UID}" in findings(run_dir)["tier ram"]


@needs_root
def test_what_the_campaign_of_another_user_has_here_is_not_said_to_be_gone() -> None:
    with shared_place() as place:
        run_dir = place / "run"
        (place / "gpt/node0").mkdir(parents=True, mode=0o700)
        (place / "gpt").chmod(0o700)
        run_dir.mkdir()
        (run_dir / "storage.json").write_text(described("ram", place / "gpt/node0"))
        (run_dir / "events.jsonl").touch()
        with stranger_for_a_while():
            found = findings(run_dir)
            with pytest.raises(EnvironmentUnusable, match=rf"rank 0 of {run_dir} cannot be seen: .* root \(uid 0\)"):
                local_pid(run_dir, "rank 0")
        itself = findings(run_dir)
    assert found["tier ram"] == f"skip: whether {place}/gpt/node0 is there cannot be seen: run this as its user"
    assert found["shared memory"] == "skip: what the campaign has here cannot be seen: run this as its user, root (uid 0)"
    assert found["listeners"] == found["shared memory"]
    assert itself["tier ram"].startswith("ok") and itself["listeners"] == "skip: no process of the campaign runs on this machine"


def test_of_a_copied_run_directory_what_is_its_own_is_looked_at_and_no_root_of_the_original(run_dir: Path, tmp_path: Path) -> None:
    stored = json.loads(described("ram", tmp_path / "ram"))
    stored["tiers"] += json.loads(described("durable", run_dir / "checkpoints"))["tiers"]
    (run_dir / "storage.json").write_text(json.dumps({**stored, "run_dir": str(run_dir)}))
    (tmp_path / "ram").mkdir(mode=0o700)
    copy = Path(shutil.copytree(run_dir, tmp_path / "copy"))
    (run_dir / "checkpoints").chmod(0o777)
    found = findings(copy)
    assert found["tier durable"] == f"ok: {copy}/checkpoints has mode 0700"
    assert found["tier ram"] == f"skip: {tmp_path}/ram is that of {run_dir}, which {copy} was copied from: look at it there"
    assert findings(run_dir)["tier ram"].startswith("ok") and findings(run_dir)["tier durable"].startswith("fail")


@pytest.mark.parametrize(
    ("address", "allowed", "open_to_others"),
    [
        ("127.0.0.1", set(), False),
        ("::1", {"10.1.2.3"}, False),
        ("0.0.0.0", set(), True),
        ("::", {"10.1.2.3"}, True),
        ("10.1.2.3", set(), True),
        ("10.1.2.3", {"10.1.2.3"}, False),
        ("10.1.2.4", {"10.1.2.3"}, True),
        ("fe80::1%eth0", {"10.1.2.3"}, True),
    ],
)
def test_a_campaign_listens_on_loopback_and_at_the_addresses_of_its_allocation(
    address: str, allowed: set[str], open_to_others: bool
) -> None:
    assert (security._why_open(address, allowed) is not None) == open_to_others


def test_what_a_job_listens_at_on_this_machine_is_compared_with_its_addresses(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, *_ = own_addresses()
    monkeypatch.setattr(security, "holder", lambda _: Owner(host="n1", pid=1, job="17", machine="elsewhere", token="t"))
    regions = memory.region_directory(run_dir, 0)
    regions.mkdir(mode=0o700)
    name = name_of(os.getpid())
    try:
        with socket.create_server((here, 0)) as listener:
            memory.leave_record(regions, "n1:1", here)
            assert findings(run_dir)["listeners"].startswith("skip"), "the number of an agent that is gone is another process's"
            name_process(NAME)
            assert here in findings(run_dir)["listeners"] and findings(run_dir)["listeners"].startswith("ok")
            memory.leave_record(regions, "n1:1", "192.0.2.1")
            (told,) = (text for check, text in findings(run_dir).items() if check.startswith("listener "))
            assert f"{here}:{listener.getsockname()[1]}, which is none of the campaign's addresses here (192.0.2.1)" in told
    finally:
        name_process(name)
        shutil.rmtree(regions)


def test_listeners_of_the_campaigns_processes_are_seen(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(security, "_places", lambda run_dir: [(psutil.Process(), set())])
    with socket.create_server(("127.0.0.1", 0)):
        assert findings(run_dir)["listeners"].startswith("ok")
        with socket.create_server(("0.0.0.0", 0)) as listener:
            (told,) = (text for check, text in findings(run_dir).items() if check.startswith("listener "))
            assert told.startswith("fail") and f"0.0.0.0:{listener.getsockname()[1]}" in told


@needs_root
def test_processes_whose_sockets_cannot_be_seen_are_not_called_in_order(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(security, "_places", lambda run_dir: [(psutil.Process(1), set())])
    monkeypatch.setattr(security, "holder", lambda _: None)
    with stranger_for_a_while():
        told = list(security._listeners(run_dir))
    assert [(each.verdict, each.text) for each in told] == [
        ("warn", "the sockets of 1 processes cannot be seen; run this as their user")
    ]


NAMED = """
import socket, sys
open("/proc/self/comm", "w").write(sys.argv[1])
with socket.create_server(("0.0.0.0", 0)):
    print("listens", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize(("name", "job", "verdict"), [("srun", "17", "ok"), ("srun", None, "fail"), ("other", "17", "fail")])
def test_where_srun_of_a_job_listens_is_slurms_affair(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, name: str, job: str | None, verdict: str
) -> None:
    command = [sys.executable, "-c", NAMED, name]
    monkeypatch.setattr(security, "holder", lambda _: Owner(host="n1", pid=1, job=job, machine="elsewhere", token="t"))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "listens\n"
        monkeypatch.setattr(security, "_places", lambda run_dir: [(psutil.Process(process.pid), set())])
        found = findings(run_dir)
        process.communicate()
    told = found["listeners of Slurm"] if verdict == "ok" else found[f"listener {name}"]
    assert told.startswith(verdict)
