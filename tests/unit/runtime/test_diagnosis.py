"""What a run died of, told from the lines of its ledger."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from resilient.diagnosis import OwnCheckpoint, diagnose, page, short
from resilient.driver.calls import answered
from resilient.exits import Exit
from resilient.protocol.disk import Diagnose
from resilient.recovery.frames import place

TRACEBACK = """Traceback (most recent call last):
  File "/opt/code/resilient/agent/bootstrap.py", line 51, in run_rank
    entry.run(entry.parse(spec.entrypoint))
  File "/home/ada/mytrain.py", line 17, in main
    loss = model(batch)
  File "/usr/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1751, in _call_impl
    return forward_call(*args, **kwargs)
  File "/home/ada/model.py", line 88, in forward
    return self.head(x)
  File "/usr/lib/python3.11/site-packages/torch/nn/modules/linear.py", line 125, in forward
    return F.linear(input, self.weight, self.bias)
RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x3 and 2x2)
"""
FAULT = {
    "kind": "exception",
    "class": None,
    "ranks": [3],
    "nodes": [1],
    "step": 12,
    "phase": "step",
    "detail": "RuntimeError: mat1 and mat2 shapes cannot be multiplied",
    "evidence": TRACEBACK,
    "detect_s": 0.01,
}
START = [
    {"event": "run_started", "generation": 0, "name": "teuken", "t": 0.0},
    {"event": "committed", "generation": 1, "step": 10, "tier": "scratch", "t": 5.0},
]


def lines(*faults: dict[str, Any], end: str = "give_up") -> list[dict[str, Any]]:
    """A job in which these faults happened, one in each generation; after all but the last the workers were started again."""
    told: list[dict[str, Any]] = list(START)
    for number, fault in enumerate(faults, 1):
        name = end if number == len(faults) else fault.get("action", "restart_workers")
        ids = {"fault_id": f"g{number}-{number}", "generation": number, "t": 10.0 * number}
        told.append({"event": "generation_started", "nodes": ["jwb01", "jwb02"], **ids})
        told.append({"event": "fault", **FAULT, **{k: v for k, v in fault.items() if k not in ("action", "to")}, **ids})
        told.append({"event": "action", "name": name, "reason": f"because of {number}", **fault.get("to", {}), **ids})
        if number < len(faults):
            told.append({"event": "recovered", "step": 12, "downtime_s": 0.5, "lost_steps": 1, **ids})
    return told


def gave_up(*faults: dict[str, Any]) -> Any:
    return diagnose(lines(*faults), code=Exit.GAVE_UP, message=f"because of {len(faults)}; rank 3:\n{TRACEBACK.rstrip()}")


def test_who_where_and_the_line_of_ones_own_code():
    found = gave_up({}, {}, {})
    assert found.what == "because of 3"
    assert found.failure.startswith("RuntimeError: mat1")
    assert found.who == "rank 3 on node 1 (jwb02)"
    assert found.where == "step 12, phase step"
    assert found.place == "/home/ada/model.py:88 in forward"
    assert found.traceback == TRACEBACK.rstrip()
    assert found.checkpoint == 10
    assert found.logs == ["logs/g1/node1.log", "logs/g2/node1.log", "logs/g3/node1.log"]


def test_what_was_tried_is_a_row_for_each_fault():
    back = {"kind": "not_finite", "action": "roll_back", "to": {"step": 5, "skip": [[11, 12]]}}
    found = gave_up({"kind": "exit", "evidence": "", "detail": "SIGKILL"}, back, {})
    assert [(each.fault_id, each.kind, each.action) for each in found.tried] == [
        ("g1-1", "exit", "restart workers"),
        ("g2-2", "not_finite", "roll back to step 5, without 11-12"),
        ("g3-3", "exception", "give up"),
    ]
    assert found.tried[0].outcome == "step 12 after 0.5 s, 1 computed again"
    assert found.tried[2].outcome == ""


def test_the_first_traceback_at_the_step_is_told_and_not_the_last_echo():
    echo = {"evidence": "process 7 of rank 0 ended by SIGABRT in phase step", "detail": "SIGABRT", "kind": "exit", "ranks": [0]}
    found = gave_up({"step": 3, "evidence": TRACEBACK.replace("mat1", "older")}, {}, echo)
    assert "mat1 and mat2" in found.traceback
    assert found.who.startswith("rank 0")


OWN = {"event": "script_checkpoint", "generation": 1, "step": 11, "rank": 0, "path": "ckpt.pt", "t": 6.0}


def test_a_checkpoint_that_a_script_has_written_by_itself_is_named_and_not_called_durable():
    found = diagnose([START[0], OWN, *lines({"phase": "snapshot"})[2:]], code=Exit.GAVE_UP, message="because of 1")
    assert found.checkpoint is None and found.own == OwnCheckpoint(11, "ckpt.pt", 6.0)
    for told in (page(found), short(found)):
        (row,) = (line for line in told.splitlines() if "checkpoint" in line and "ckpt.pt" in line)
        assert "durable" not in told and "step 11" in row and "may be incomplete" in row
        assert time.strftime("%m-%d %H:%M:%S", time.localtime(6.0)) in row
    assert "step 11, if that checkpoint is whole" in found.advice[-1]


def test_a_script_whose_steps_are_durable_too_has_both_named():
    found = diagnose([*START, OWN, *lines({})[2:]], code=Exit.GAVE_UP, message="because of 1")
    assert "step 10 is durable; the script itself wrote step 11" in page(found)
    assert "step 11, if" in found.advice[-1]
    found = diagnose([*START, {**OWN, "step": 9}, *lines({})[2:]], code=Exit.GAVE_UP, message="because of 1")
    assert "from step 10" in found.advice[-1], "the newest"


def test_a_checkpoint_that_a_script_wrote_in_an_earlier_job_is_named():
    before = OwnCheckpoint(11, "ckpt.pt")
    assert "step 11, to ckpt.pt" in page(diagnose(lines({})[2:], own=before, code=Exit.GAVE_UP, message="because of 1"))


def test_only_the_last_job_counts_and_a_refused_checkpoint_is_none():
    rejected = {"event": "checkpoint_rejected", "generation": 1, "step": 10, "tier": "scratch", "t": 6.0}
    found = diagnose([*lines({}, {}), *START, rejected, *lines({})[2:]], code=Exit.GAVE_UP, message="because of 1")
    assert len(found.tried) == 1
    assert found.checkpoint is None


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"class": "deterministic"}, "wherever it runs"),
        ({"class": "node"}, "take node 1 out"),
        ({"class": "transient"}, "network"),
        ({}, "mend the code, or the data that step 12 reads"),
        ({"files": "/data/x.idx", "class": "node"}, "Bring back what is missing or unreadable, /data/x.idx"),
        ({"kind": "exit", "evidence": "killed"}, "dmesg"),
        ({"kind": "exit", "detail": "SIGKILL"}, "dmesg"),
        ({"kind": "exit", "detail": "exit code 3"}, "left with exit code 3 by itself"),
        ({"kind": "exit", "detail": "exit code 0 after step 11, while rank 0 went on"}, "same number of steps"),
        ({"kind": "node_lost"}, "node 1"),
        ({"kind": "not_finite"}, "optimizer.lr"),
        ({"kind": "hang"}, "incident"),
    ],
)
def test_the_advice_follows_the_class_and_else_the_kind(fault, words):
    assert words in " ".join(gave_up(fault).advice)
    assert "from step 10" in gave_up(fault).advice[-1]


def test_a_program_that_left_by_itself_was_killed_by_nobody():
    assert "dmesg" not in " ".join(gave_up({"kind": "exit", "detail": "exit code 3"}).advice)


def test_a_hang_points_to_its_incident():
    assert "incidents/g1-1/" in gave_up({"kind": "hang"}).logs


@pytest.mark.parametrize(
    ("there", "named"),
    [
        ({"logs/agent1.log"}, ["logs/agent1.log"]),
        ({"logs/agent0.log", "logs/agents.log"}, ["logs/agents.log"]),  # it has not come to a log of its own
        ({"logs/agent0.log", "logs/agent1.log", "logs/agents.log"}, ["logs/agent1.log", "logs/agents.log"]),
        (set(), []),
    ],
)
def test_of_a_node_whose_agent_is_gone_those_logs_are_named_that_there_are(there: set[str], named: list[str]):
    lost = lines({"kind": "node_lost", "ranks": [], "detail": "the agent of node 1 does not start"})
    assert diagnose(lost, code=Exit.GAVE_UP, message="", agents=there).logs == named


def test_the_page_names_the_log_of_agents_that_is_in_the_run_directory(tmp_path: Path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/agents.log").touch()
    lost = lines({"kind": "node_lost", "ranks": [], "detail": "the agent of node 1 does not start"})
    whole = {
        "host": "jwb01",
        "target_step": None,
        "world_size": 8,
        "resumed_step": None,
        "step": 10,
    }  # in the ledger lines have these
    (tmp_path / "events.jsonl").write_text("".join(f"{json.dumps(whole | each)}\n" for each in lost))
    answer = answered(Diagnose(call=1, exit_code=int(Exit.GAVE_UP), message="it does not start", traceback=""), str(tmp_path))
    assert answer.error is None
    told = (tmp_path / "diagnosis.md").read_text()
    assert "- logs/agents.log" in told and "agent1.log" not in told


def test_the_page_is_utf8_whatever_the_locale_is(tmp_path: Path):
    program = (
        "from resilient.driver.calls import answered; from resilient.protocol.disk import Diagnose; import sys; "
        "answer = answered(Diagnose(call=1, exit_code=70, message='die Gr\\u00f6\\u00dfe', traceback=''), sys.argv[1]); "
        "assert answer.error is None, answer.error"
    )
    environ = {**os.environ, "LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-c", program, tmp_path], env=environ, check=True)
    assert "die Größe" in (tmp_path / "diagnosis.md").read_text(encoding="utf-8")


def test_an_end_without_a_fault_says_the_message_and_what_storage_said():
    storage = {"event": "fault", "kind": "storage", "detail": "tier scratch: No space left on device", "generation": 1, "t": 7.0}
    found = diagnose([*START, storage], code=Exit.UNUSABLE, message="step 9 could not be made durable")
    assert found.what == "step 9 could not be made durable"
    assert "No space left" in page(found)
    assert "exit 69" in page(found)


def test_what_could_not_be_saved_is_said_after_the_evidence():
    message = f"because of 1; rank 3:\n{TRACEBACK.rstrip()}; step 14 could not be made durable"
    found = diagnose(lines({}), code=Exit.GAVE_UP, message=message)
    assert "step 14 could not be made durable" in short(found)
    assert "step 14 could not be made durable" in page(found)


def test_evidence_that_is_in_the_reason_too_leaves_no_half_of_the_reason_behind():
    evidence = "it has failed: OSError: [Errno 28] No space left on device"
    reason = f"the same failure (the agent is gone: {evidence}) at start-up for the third time"
    told = lines({"kind": "node_lost", "detail": f"the agent is gone: {evidence}", "evidence": evidence})
    for also in ("", "step 12 could not be saved"):
        message = f"{reason}; rank 3:\n{evidence}" + f"; {also}" * bool(also)
        assert diagnose(told, code=Exit.GAVE_UP, message=message).also == also


def test_a_message_that_says_everything_is_left_alone():
    fault = {"evidence": "all checkpoints are damaged"}
    found = diagnose(lines(fault), code=Exit.GAVE_UP, message="all checkpoints are damaged")
    assert found.alone
    assert found.what == "all checkpoints are damaged"
    assert not gave_up({}).alone


def test_the_page_holds_all_and_the_short_form_the_end_of_the_traceback():
    found = gave_up(*[{}] * 3)
    text = page(found)
    for words in (
        "# teuken gave up (exit 70)",
        found.who,
        found.place,
        TRACEBACK.strip(),
        "g2-2",
        "logs/g3/node1.log",
        *found.advice,
    ):
        assert words in text
    told = short(found)
    assert "RuntimeError: mat1 and mat2 shapes" in told
    assert "restart workers x 2" in told
    assert len(told.splitlines()) < 30
    json.dumps(told)


def test_lines_of_the_short_form_can_be_read_in_a_terminal():
    told = short(gave_up({"evidence": f"ValueError: {'7, ' * 2000}the end"}))
    assert max(map(len, told.splitlines())) < 600 and "ValueError: 7, 7" in told


@pytest.mark.parametrize(
    ("traceback", "expected"),
    [
        ("process 7 ended by SIGKILL", ""),
        ('  File "/usr/lib/python3.11/json/decoder.py", line 5, in decode', "/usr/lib/python3.11/json/decoder.py:5 in decode"),
        ('  File "/a/mine.py", line 5 in inner\n  File "/a/main.py", line 9 in <module>', "/a/mine.py:5 in inner"),
        ('  File "/v/site-packages/trainer/loop.py", line 5, in f', "/v/site-packages/trainer/loop.py:5 in f"),
    ],
)
def test_the_place_of_a_traceback(traceback, expected):
    assert place(traceback) == expected


@pytest.mark.parametrize(
    ("missed", "told"),
    [
        ([], "step 10 is the newest"),
        ([9], "step 10 is the newest"),
        ([11, 14], "step 10 is the newest; step 14 was due on tier scratch and left out"),
    ],
)
def test_the_newest_checkpoint_is_told_and_one_that_was_due_after_it_and_left_out(missed: list[int], told: str):
    left_out = [
        {"event": "checkpoint_missed", "generation": 1, "step": step, "tier": "scratch", "reason": "busy", "count": 1, "t": 6.0}
        for step in missed
    ]
    given = lines({})
    found = diagnose([*given[:-2], *left_out, *given[-2:]], code=Exit.GAVE_UP, message="because of 1")
    assert told in page(found)
    assert ("left out" in page(found)) is ("left out" in told)
