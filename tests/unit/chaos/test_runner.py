"""The runner: carries out a plan, and loses no fault of it without a word. Injectors are real, ranks there are none."""

import json
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from leases import write_lease

from chaos.experiment import Experiment, Limits
from chaos.orchestration import watch as of_watch
from chaos.orchestration.campaign import Campaign
from chaos.orchestration.execution import _planned, attach
from chaos.orchestration.runner import Outcome, Runner, Terms
from chaos.orchestration.sites import Here, Started
from chaos.planning import World, plan
from chaos.verdict import record
from chaos.verdict.gathering import inspect, observe, places
from chaos.verdict.observation import JobRun
from chaos.verdict.report import as_json
from chaos.verdict.verdict import judge
from checkpoint.local_shard import LocalShard
from checkpoint.saving import save
from resilient import ledger
from resilient.config import dump, load
from resilient.driver.lease import LOCK, holder

TERMS = Terms(Limits(), steady_steps=5, own=False)


class Heard:
    """A display that hands on what it is told."""

    def __init__(self, hear: Callable[[str], None] = lambda text: None) -> None:
        self.hear = hear
        self.notes: list[str] = []
        self.generations: list[int] = []

    def note(self, text: str) -> None:
        self.notes.append(text)
        self.hear(text)

    def event(self, event: Mapping[str, Any]) -> None:
        self.generations.append(event["generation"])


@pytest.fixture
def campaign(tmp_path: Path) -> Campaign:
    """One that told of many steps, and of none that will not have been finished when it is broken."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    path = run_dir / "config.yaml"
    path.write_text(f"run_dir: {run_dir}\ncluster: {{device: cpu, procs_per_node: 1}}\nchaos: {{allow: true}}\n")
    config = load(path, [])
    path.write_text(dump(config))
    tell(run_dir, [0], 1)
    lines = [{"t": time.time() + 1000 + step, "generation": 1, "step": step, "step_s": 0.01, "loss": 1.0} for step in range(1, 31)]
    (run_dir / ledger.METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Campaign(config, tmp_path, Here(), {})


def tell(run_dir: Path, members: list[int], generation: int) -> None:
    """Of a generation on these nodes, with a rank each."""
    where = {"members": members, "nodes": [socket.gethostname()] * len(members), "world_size": len(members)}
    line = {"t": time.time(), "event": "generation_started", "host": socket.gethostname(), "generation": generation, **where}
    with (run_dir / ledger.EVENTS).open("a") as events:
        events.write(json.dumps({**line, "resumed_step": 0}) + "\n")


def started_again(campaign: Campaign, target_step: int | None = 1000) -> None:
    """By whoever does, so that the next one takes it up."""
    line = {"t": time.time() + 1, "event": "run_started", "host": "h", "generation": 2, "name": "run", "target_step": target_step}
    with (campaign.run_dir / ledger.EVENTS).open("a") as events:
        events.write(json.dumps(line) + "\n")


def carried_out(campaign: Campaign, heard: Heard, terms: Terms = TERMS, nodes: int = 1, **keys: Any) -> tuple[Runner, Outcome]:
    wanted = Experiment.model_validate({"name": "test", "campaign": {}, **keys})
    runner = Runner(plan(wanted, 0, World(nodes, 1)), campaign, Here(), replace(terms, limits=wanted.limits), heard, {})
    return runner, runner.run()


def test_a_run_directory_that_is_full_ends_no_experiment_and_has_all_that_was_done_once_it_is_not(campaign: Campaign):
    path = campaign.run_dir / record.RECORD
    path.symlink_to("/dev/full")
    heard = Heard(lambda text: path.unlink() if text.startswith("2-worker_kill") else None)
    runner, _ = carried_out(campaign, heard, faults=[{"fault": "worker_kill"}, {"fault": "worker_kill"}])
    assert [(each.id, each.failed) for each in runner.injections] == [
        ("1-worker_kill", "rank 0 does not run here"),
        ("2-worker_kill", "rank 0 does not run here"),
    ]
    assert record.read(campaign.run_dir) == runner.injections


def test_what_was_done_by_another_experiment_is_not_taken_for_done_by_this_one(campaign: Campaign):
    before, _ = carried_out(campaign, Heard(), faults=[{"fault": "worker_kill"}])
    now, _ = carried_out(campaign, Heard(), faults=[{"fault": "worker_kill"}])
    assert [each.id for each in now.injections] == ["1-worker_kill"]
    assert record.read(campaign.run_dir) == [*before.injections, *now.injections]


def test_what_a_campaign_told_before_an_experiment_was_attached_is_not_shown_as_news(campaign: Campaign):
    heard = Heard(lambda text: tell(campaign.run_dir, [0], 2) if text.startswith("1-worker_kill") else None)
    carried_out(campaign, heard, faults=[{"fault": "worker_kill"}, {"fault": "worker_kill"}])
    assert heard.generations == [2]


def test_however_short_a_mix_is_the_faults_before_it_are_injected(campaign: Campaign):
    terms = replace(TERMS, minutes=1e-6)
    mix = {"kinds": {"worker_kill": 1}, "minutes": 1e-6, "calm_s": (60, 60)}
    runner, outcome = carried_out(campaign, Heard(), terms, faults=[{"fault": "worker_kill", "id": "first"}], random=mix)
    assert (outcome.finished, outcome.why) == (True, "all faults were injected")
    assert [(each.id, each.failed) for each in runner.injections] == [("first", "rank 0 does not run here")]


def test_what_is_left_out_is_told_and_a_fault_of_the_schedule_that_is_was_not_injected(campaign: Campaign):
    wanted = Experiment.model_validate(
        {
            "name": "test",
            "campaign": {},
            "faults": [{"fault": "worker_kill"}, {"fault": "link_down"}, {"fault": "worker_kill"}],
            "random": {"kinds": {"link_flap": 1}, "count": 1},
            "limits": {"faults": 1},
        }
    )
    heard = Heard()
    site = Here()
    site.has = frozenset()
    made = _planned(wanted, 0, campaign.config, site, heard)
    assert heard.notes == [
        "left out: 2-link_down: needs lab, root",
        "left out: link_flap: needs lab, root",
        "left out: the rest: limits.faults: 1",
    ]
    runner = Runner(made, campaign, site, TERMS, heard, {})
    runner.run()
    assert {each.id: each.failed for each in runner.injections} == {
        "1-worker_kill": "rank 0 does not run here",
        "2-link_down": "left out: needs lab, root",
        "3-worker_kill": "left out: limits.faults: 1",
    }
    seen = observe(campaign.run_dir, (), {}, experiment="test", injections=runner.injections, left_out=made.left_out)
    told = as_json(judge(seen))
    assert told["left_out"] == made.left_out
    assert [each["wrong"] for each in told["injections"] if each["id"] == "2-link_down"] == [
        {"injected": "left out: needs lab, root"}
    ]


def test_an_attached_campaign_that_is_started_again_by_somebody_else_has_recovered_from_its_end(campaign: Campaign):
    driver = subprocess.Popen(["sleep", "600"])
    write_lease(campaign.run_dir, driver.pid)
    heard = Heard(lambda text: started_again(campaign) if text.startswith("1-driver_kill") else None)
    threading.Thread(target=driver.wait, daemon=True).start()
    runner, outcome = carried_out(campaign, heard, faults=[{"fault": "driver_kill"}], limits={"recovery_s": 60})
    assert [each.failed for each in runner.injections] == [""]
    assert (outcome.finished, outcome.why) == (True, "all faults were injected")
    assert not [note for note in heard.notes if "not recovered from" in note]


@pytest.mark.parametrize(("code", "ok", "why"), [
    (1, False, "the campaign ended with exit code 1"),
    (75, True, "the campaign was stopped"),
])  # fmt: skip
def test_an_attached_campaign_that_gives_up_makes_a_bad_verdict_although_it_recovered_from_all_that_was_injected(
    campaign: Campaign, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, ok: bool, why: str
):
    monkeypatch.setattr(of_watch, "SUCCESSOR_S", 3.0)
    holds = 'exec 9>"$1"; flock 9; exec sleep 600'
    driver = subprocess.Popen(["sh", "-c", holds, "sh", str(campaign.run_dir / LOCK)])
    write_lease(campaign.run_dir, driver.pid)
    while holder(campaign.run_dir) is None:
        time.sleep(0.01)
    threading.Thread(target=driver.wait, daemon=True).start()

    def goes_on_and_ends(text: str) -> None:
        if text.startswith("1-driver_kill"):
            started_again(campaign)
            line = {"t": time.time() + 2, "event": "run_finished", "host": "h", "generation": 2, "exit_code": code, "step": 30}
            with (campaign.run_dir / ledger.EVENTS).open("a") as events:
                events.write(json.dumps(line) + "\n")

    mix = {"kinds": {"worker_kill": 1}, "count": 5, "calm_s": (1000, 1000)}
    wanted = {"name": "test", "campaign": {}, "steady_steps": 5, "faults": [{"fault": "driver_kill"}], "random": mix}
    out = tmp_path / "out"
    out.mkdir()
    verdict = attach(Experiment.model_validate(wanted), 0, campaign.run_dir, out, Heard(goes_on_and_ends)).verdict
    assert verdict.broken == ([] if ok else ["reached"])
    assert {check.name: check.detail for check in verdict.checks}["reached"] == why


def test_an_experiment_ends_once_the_tiers_are_well(campaign: Campaign):
    def tells(*lines: dict[str, object]) -> None:
        common = {"t": time.time(), "host": "h", "generation": 1, "fault_id": "s1"}
        with (campaign.run_dir / ledger.EVENTS).open("a") as events:
            events.write("".join(json.dumps(common | line) + "\n" for line in lines))

    who = {"kind": "storage", "ranks": [], "nodes": [0], "step": 3}
    well: dict[str, object] = {"event": "recovered", "step": 4, "downtime_s": 0.0, "lost_steps": 0}
    timer = threading.Timer(1.0, tells, (well,))

    def degraded(text: str) -> None:
        if text.startswith("1-worker_kill"):
            tells({"event": "fault", **who, "detail": "", "evidence": "", "detect_s": 0.0})
            tells({"event": "action", "name": "degrade_tier", "reason": ""})
            timer.start()

    runner, outcome = carried_out(campaign, Heard(degraded), faults=[{"fault": "worker_kill"}])
    timer.join()
    assert (outcome.finished, runner._watch.tiers_are_well) == (True, True)


class EndsWithZero(Here):
    """Whatever runs there ends at once."""

    def run(self, words: Sequence[str], environ: Mapping[str, str], output: Path, nodes: int) -> Started:
        return super().run(["true"], environ, output, nodes)


@pytest.mark.parametrize("to_target", [True, False])
@pytest.mark.parametrize(("target_step", "finished", "target"), [(1000, False, None), (30, True, None), (None, True, 30)])
def test_a_campaign_that_ends_by_itself_has_reached_the_target_of_its_config_or_none(
    campaign: Campaign, to_target: bool, target_step: int | None, finished: bool, target: int | None
):
    site = EndsWithZero()
    started_again(campaign, target_step)
    own = Campaign(campaign.config, campaign.directory, site, {})
    wanted = Experiment.model_validate({"name": "test", "campaign": {}, "faults": [{"fault": "worker_kill"}]})
    terms = replace(TERMS, steady_steps=1000, own=True, to_target=to_target)
    outcome = Runner(plan(wanted, 0, World(1, 1)), own, site, terms, Heard(), {}).run()
    assert (outcome.finished, outcome.target) == (finished, target)
    assert ("ended by itself at step 30, and its target was step 1000" in outcome.why) == (not finished)


def test_of_a_campaign_that_goes_on_no_checkpoint_is_read_and_no_machine_inspected(campaign: Campaign):
    save(campaign.run_dir / "checkpoints", 1, [LocalShard("a", (1,), (0,), torch.ones(1), (1,))], {}, generation=0)
    found = [
        observe(campaign.run_dir, jobs, inspect(places(campaign.config)), experiment="test", injections=())
        for jobs in ((), (JobRun(0.0, 1.0, 0),))
    ]
    assert [len(seen.checkpoints) for seen in found] == [0, 1]
    assert [bool(seen.left) for seen in found] == [False, True]


def test_a_spare_that_stands_in_for_a_node_that_was_hit_is_another_node(campaign: Campaign):
    faults = [
        {"fault": "agent_kill", "target": {"node": 0}},
        {"fault": "agent_kill", "target": {"node": 0}, "id": "after"},
        {"fault": "worker_kill", "target": {"rank": 0}, "at": {"after": "after"}},
    ]

    def replaced(text: str) -> None:
        if text.startswith("1-agent_kill"):
            tell(campaign.run_dir, [2, 1], 2)

    limits = {"nodes": 1, "at_once": 2}
    mix = {"kinds": {"agent_kill": 1}, "count": 1, "calm_s": (0, 0)}
    runner, _ = carried_out(campaign, Heard(replaced), nodes=2, faults=faults, random=mix, limits=limits)
    why = "limits.nodes: 1, and no node that was hit before is there"
    assert [(each.id, each.failed) for each in runner.injections] == [
        ("1-agent_kill", "the agent of node 0 does not run here"),
        ("after", f"left out: {why}"),
        ("3-worker_kill", "left out: comes with after, which is left out"),
    ]
    assert runner.left_out == {"after": why, "3-worker_kill": "comes with after, which is left out", "4-agent_kill": why}
