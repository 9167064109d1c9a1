"""Which faults are a node's own, row by row, and the file that remembers it."""

import errno
from pathlib import Path
from typing import Any

import pytest

from resilient.slurm.badnodes import ASIDE, FILE, bad_nodes, remember
from resilient.slurm.blame import nodes_at_fault


def fault(kind: str, **fields: Any) -> dict[str, Any]:
    return {"kind": kind, "class": None, "nodes": [1], "step": 7, "detail": "what", "detect_s": 0.1, **fields}


@pytest.mark.parametrize(
    ("seen", "action", "found"),
    [
        (fault("node_lost", detect_s=8.0), "replace_node", {1: "what"}),
        (fault("node_lost", detect_s=8.0), "restart_agent", {1: "what"}),  # a spare
        (fault("node_lost", detect_s=0.1), "replace_node", {}),  # its agent was killed, and the node may be well
        (fault("node_lost", detect_s=8.0), "finish_drain", {}),  # the job was ending
        (fault("node_lost"), "exclude_node", {1: "what"}),  # a health check
        (fault("straggler"), "replace_node", {1: "what"}),
        (fault("straggler"), "report", {}),
        (fault("exit", **{"class": "node"}), "restart_workers", {1: "what"}),
        (fault("exit", **{"class": "deterministic"}), "restart_workers", {}),
        (fault("exit"), "restart_workers", {}),
        (fault("time_limit", nodes=[]), "finish_drain", {}),
        ({name: value for name, value in fault("storage", step=None).items() if name != "class"}, "degrade_tier", {}),
    ],
)
def test_a_fault_is_the_nodes_own_or_not(seen: dict[str, Any], action: str, found: dict[int, str]):
    assert nodes_at_fault(seen, action, []) == found


def test_a_node_whose_workers_fail_at_one_step_after_the_other_is_at_fault_itself():
    earlier = [fault("exit", step=1), fault("hang", step=2), fault("exit", step=2, nodes=[0])]
    assert nodes_at_fault(fault("exit", step=2), "restart_workers", earlier) == {}  # the same step again: it may be a bug
    (reason,) = nodes_at_fault(fault("exit", step=3), "restart_workers", earlier).values()
    assert reason == "workers failed there at 3 steps, the last time: what"
    assert nodes_at_fault(fault("exit", step=3, nodes=[0]), "restart_workers", earlier) == {}


def test_a_bad_node_is_remembered_until_its_time_is_over(tmp_path: Path):
    assert bad_nodes(tmp_path, 0.0) == []
    remember(tmp_path, {"n2": "gone"}, now=100.0, for_s=10.0)
    remember(tmp_path, {"n3": "slow"}, now=105.0, for_s=10.0)
    assert [(each.host, each.reason, each.until_t) for each in bad_nodes(tmp_path, 106.0)] == [
        ("n2", "gone", 110.0),
        ("n3", "slow", 115.0),
    ]
    remember(tmp_path, {"n2": "gone again"}, now=108.0, for_s=10.0)
    assert {each.host: each.reason for each in bad_nodes(tmp_path, 112.0)} == {"n3": "slow", "n2": "gone again"}
    assert [each.host for each in bad_nodes(tmp_path, 116.0)] == ["n2"]
    assert bad_nodes(tmp_path, 118.0) == []


def test_a_file_that_is_damaged_keeps_nobody_out(tmp_path: Path):
    for text in ("nonsense", "[]", '[{"host": 1}]', "{}"):
        (tmp_path / FILE).write_text(text)
        assert bad_nodes(tmp_path, 0.0) == []


def test_what_a_person_has_edited_wrongly_is_not_lost_when_a_node_is_added(tmp_path: Path):
    edited = '[{"host": "n1", "reason": "by hand", "t": 0.0, "until_t": 50.0},]'
    (tmp_path / FILE).write_text(edited)
    remember(tmp_path, {"n2": "gone"}, now=1.0, for_s=10.0)
    assert [each.host for each in bad_nodes(tmp_path, 2.0)] == ["n2"]
    assert (tmp_path / ASIDE).read_text() == edited


def test_a_list_that_cannot_be_read_for_now_is_not_written_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    remember(tmp_path, {"n1": "gone"}, now=1.0, for_s=10.0)

    def stale(path: Path) -> bytes:
        raise OSError(errno.ESTALE, "Stale file handle", str(path))

    with monkeypatch.context() as patched, pytest.raises(OSError, match="Stale"):
        patched.setattr(Path, "read_bytes", stale)
        remember(tmp_path, {"n2": "gone"}, now=2.0, for_s=10.0)
    assert [each.host for each in bad_nodes(tmp_path, 3.0)] == ["n1"]
