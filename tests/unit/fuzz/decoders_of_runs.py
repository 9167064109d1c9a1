"""The run directory, reports of it, configs and experiments."""

import io
import math
import os
from pathlib import Path
from typing import Any

import msgspec
from decoder import CORPUS, Decoder, corpus, in_file

from checkpoint import framing


def campaigns(directory: Path) -> list[Decoder]:
    from rich.console import Console

    from resilient import diagnosis, evacuate, ledger, spill, storage
    from resilient.config import Config
    from resilient.drawing.picture import picture
    from resilient.driver import lease, spill_file
    from resilient.exits import Exit
    from resilient.identity import record as identity
    from resilient.identity.comparison import compare
    from resilient.identity.fingerprint import Accepted, Content, Fingerprint, Lineage
    from resilient.identity.resume import Known
    from resilient.logs import archive
    from resilient.past.fold import past_of
    from resilient.past.record import Reader, encoded
    from resilient.past.record import decoded as past_decoded
    from resilient.protocol.disk import Item
    from resilient.protocol.messages import Record
    from resilient.status import add_identity, render, summarize

    run_dir = directory / "run"
    run_dir.mkdir()

    def told(events: Path, metrics: Path, *, drawn: bool) -> None:
        lines = list(ledger.read_events(events))
        Reader(run_dir).read()
        past = past_of(lines, ledger.read_metrics(metrics))
        for code in (Exit.GAVE_UP, Exit.UNUSABLE):
            diagnosis.page(diagnosis.diagnose(lines, code=code, message="gave up"))
        summary = summarize(past, locked=True, now=1795393700.0)
        if drawn:
            Console(file=io.StringIO(), width=100).print(render(summary))
            picture(ledger.read(events), ledger.read(metrics))  # which shows what there is of a line

    def events(path: Path) -> None:
        (run_dir / ledger.METRICS).write_bytes((CORPUS / "metrics.jsonl").read_bytes())
        told(path, run_dir / ledger.METRICS, drawn=path.stat().st_size % 8 == 0)

    def metrics(path: Path) -> None:
        (run_dir / ledger.EVENTS).write_bytes((CORPUS / "events.jsonl").read_bytes())
        told(run_dir / ledger.EVENTS, path, drawn=path.stat().st_size % 8 == 0)

    kept = Fingerprint(
        keys={"seed": 42, "data.path": [{"path": "/a", "weight": 1.0}], "model.norm_eps": 1e-5, "data.split": [949, 50, 1]},
        given=["seed"],
        contents={"data.path": [Content(5, "0" * 64)] * 2},
        prepared={"data/corpus.bin": Content(5, "1" * 64)},
        versions={"torch": "2.13"},
        accepted=[Accepted("seed", 1, 42, 5, 1.5)],
        lineage=Lineage("/a", "a", 5, 1, {"seed": (1, 42)}, 1.5),
    )

    def known(path: Path) -> None:
        found = identity.decode(path.read_bytes())
        summary = summarize(past_of((), ()), locked=False, now=1.0)
        add_identity(summary, found, "x")
        Console(file=io.StringIO(), width=100).print(render(summary))
        for each in (*compare(found, kept), *compare(kept, found)):
            str(each)
        Known(found, False, ()).keep(Config())

    def kept_past() -> list[bytes]:
        for name in (ledger.EVENTS, ledger.METRICS):
            (run_dir / name).write_bytes((CORPUS / name).read_bytes())
        reader = Reader(run_dir)
        reader.read()
        return [encoded(reader.marks)]

    def use_past(data: bytes) -> None:
        fuzzed = Reader(run_dir)
        fuzzed.marks = past_decoded(data)
        fuzzed.read()

    items = [Item(1, "events.jsonl", '{"a": 1}\n'), Item(2, "metrics.jsonl", "{}\n"), Item(3, "x.json", "text", True)]
    spilled = b"".join(framing._encoder.encode(each) + b"\n" for each in items)
    left = run_dir / "left"
    left.mkdir()
    (left / lease.LOCK).touch()
    spill.leave(left, 3, "n1", [Record(0, 5.5, "health", {"x": 1}), Record(1, 6.5, None, {"loss": math.nan, "step": 5})])
    (leaving,) = (left / ".spill").glob("*.jsonl")
    leaving_text = leaving.read_bytes()

    class Book:
        def event(self, event: str, fields: Any, *, generation: int, t: float, host: str) -> object:
            return ledger.encoded(ledger.event_entry(event, fields, generation=generation, t=t, host=host))

        def metrics(self, fields: Any, *, generation: int, t: float) -> object:
            return ledger.encoded(ledger.metrics_entry(fields, generation=generation, t=t))

    folders = run_dir / "packing"
    for name in ("g1", "g2"):
        (folders / name).mkdir(parents=True)
        (folders / name / "node0.log").write_text(f"{name} has said\n" * 20)
    archive.add(run_dir / "logs.tar.zst", [folders / "g1", folders / "g2"])
    packed = (run_dir / "logs.tar.zst").read_bytes()

    def unpacked(path: Path) -> None:
        for each in archive.contents(path):
            for _ in archive.read(path, each):
                pass

    evacuation = b'{"token": "c0ffee", "nodes": ["n1", "2"]}'
    owner = b'{"host": "n1", "pid": 17, "job": "", "machine": "a-b", "token": "c0ffee"}'
    return [
        Decoder("identity", lambda: [msgspec.json.encode(kept)], in_file(run_dir / "identity.json", known), (ValueError,)),
        Decoder("past", kept_past, use_past),
        Decoder("events.jsonl", corpus("events.jsonl"), in_file(run_dir / ledger.EVENTS, events)),
        Decoder("metrics.jsonl", corpus("metrics.jsonl"), in_file(run_dir / ledger.METRICS, metrics)),
        Decoder(
            "storage.json",
            corpus("storage.json"),
            in_file(run_dir / storage.FILE, lambda path: storage.read(path.parent)),
            (ValueError, OSError),
        ),
        Decoder("spill file", lambda: [spilled], in_file(run_dir / "spill" / "1.jsonl", spill_file.items)),
        Decoder("records left behind", lambda: [leaving_text], in_file(leaving, lambda _: spill.take_in(left, Book()))),
        Decoder("lease", lambda: [owner], in_file(run_dir / lease.LEASE, lease.read)),
        Decoder(
            "evacuate.json",
            lambda: [evacuation],
            in_file(run_dir / evacuate.FILE, lambda path: evacuate.requested(path.parent, "c0ffee")),
            evacuate.MALFORMED,
        ),
        Decoder("archive of logs", lambda: [packed], in_file(run_dir / "damaged.tar.zst", unpacked), (archive.DamagedArchive,)),
    ]


_CONFIG = b"""# a campaign
name: quick
run_dir: runs/${name}
cluster: {nodes: 2, procs_per_node: 1, device: cpu}
train: &train
  steps: 200
  global_batch_size: 16
data: {split: [9, 1, 0]}
checkpoint:
  tiers:
    - {name: ram, path: /dev/shm/x, keep_last: 2}
    - {name: durable, path: "${run_dir}/checkpoints"}
args: {<<: *train, list: [*train, 2001-01-01, 0x1f, 1e3, ~, yes]}
"""
_EXPERIMENT = b"""name: test
campaign: {config: {train: {steps: 10}}}
steady_steps: 5
faults:
  - {fault: worker_kill, target: {rank: 1}, at: {step: 3}, id: a}
  - {fault: slow_rank, at: {after: a, phase: recovery}, with: {factor: 2.0}}
random: {seed: 1, count: 3, kinds: {worker_kill: 1, worker_stop: {weight: 0.5}}}
"""


def reports(run_dir: Path) -> list[Decoder]:
    from resilient import ledger
    from resilient.report.html import Subject, page
    from resilient.report.markdown import markdown
    from resilient.report.reading import read
    from resilient.status import Summary
    from resilient.watch.judgement import judge
    from resilient.watch.look import look

    def report(path: Path) -> None:
        subject = Subject("x", Summary(), read(path.parent), 1795393700.0, {})
        assert page(subject).endswith("</html>\n") and markdown(subject)

    def watched(path: Path) -> None:
        judge(look(path.parent, 1795393700.0))

    return [
        Decoder("report: events.jsonl", corpus("events.jsonl"), in_file(run_dir / ledger.EVENTS, report)),
        Decoder("report: metrics.jsonl", corpus("metrics.jsonl"), in_file(run_dir / ledger.METRICS, report)),
        Decoder("watch", corpus("events.jsonl"), in_file(run_dir / ledger.EVENTS, watched)),
    ]


def configs(directory: Path) -> list[Decoder]:
    from chaos import experiment
    from chaos.injectors.injector import InjectionRequest
    from chaos.verdict import record
    from resilient.config import ConfigError, document, load

    def config(path: Path) -> None:
        try:
            load(path, [], {})
        except ConfigError as error:
            assert all(line.isprintable() for line in str(error).split("\n")), error
            raise
        finally:
            document.value_at(path, "train", "precision")

    def override(data: bytes) -> None:
        name, _, value = os.fsdecode(data).partition("\n")
        load(directory / "config.yaml", [name, f"train.steps={value}"], {})

    (directory / "config.yaml").write_bytes(_CONFIG.replace(b"args", b"#args"))
    request = InjectionRequest("x", "worker_kill", Path("/scratch/run"), _target())
    injected = b'{"id": "1", "fault": "worker_kill", "params": {}, "target": {"rank": 1, "node": 0}, "asked_t": 1.5, "t": 2.5}\n'
    return [
        Decoder("config", lambda: [_CONFIG, b"name: x\n"], in_file(directory / "fuzzed.yaml", config), (ConfigError,)),
        Decoder("override", lambda: [b"name=x\n5", b"data.split.0=3\n7"], override, (ConfigError,)),
        Decoder(
            "experiment",
            lambda: [_EXPERIMENT],
            in_file(directory / "experiment.yaml", experiment.read),
            (experiment.ExperimentError,),
        ),
        Decoder(
            "injection request",
            lambda: [request.line().encode()],
            lambda data: InjectionRequest.of(data.decode(errors="replace")),
            (ValueError,),
        ),
        Decoder(
            "chaos.jsonl",
            lambda: [injected * 3],
            in_file(directory / "record" / record.RECORD, lambda path: record.read(path.parent)),
        ),
    ]


def _target() -> Any:
    from chaos.injectors.context import Target

    return Target(rank=1)
