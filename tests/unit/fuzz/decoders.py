"""All that reads what others have written: real inputs, the call, and the errors that it may answer with."""

import io
import json
import math
import os
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import crc32c
import msgspec
from samples import encoded, samples

from checkpoint import framing, handshake, manifest, metadata, protocol, sealed, shard_manifest, shard_reads, slots, worker_news
from checkpoint.errors import CheckpointError, DamagedCheckpoint
from checkpoint.layout import ArrayInfo, arrange
from checkpoint.manifest import FileEntry, Manifest

CORPUS = Path(__file__).with_name("corpus")
Call = Callable[[bytes], object]


@dataclass(frozen=True)
class Decoder:
    """One reader.

    Attributes:
        inputs: real ones, which it reads without an error.
        errors: with which it may refuse all others.
        repair: makes checksums of an input right again.
    """

    name: str
    inputs: Callable[[], list[bytes]]
    call: Call
    errors: tuple[type[BaseException], ...] = ()
    repair: Callable[[bytes], bytes] | None = None


def decoders(directory: Path) -> list[Decoder]:
    """All of them. Args: directory: in RAM, for inputs that are files."""
    return [
        *_messages(),
        *_checkpoints(directory),
        *_campaigns(directory),
        *_reports(directory / "reported"),
        *_configs(directory),
        *_slurm(directory),
        *_node(directory),
        *_data(directory),
        *_foreign(directory / "foreign"),
    ]


def _in_file(path: Path, use: Callable[[Path], object]) -> Call:
    """A call with the input in a file."""
    path.parent.mkdir(parents=True, exist_ok=True)

    def call(data: bytes) -> object:
        path.write_bytes(data)
        return use(path)

    return call


def _corpus(name: str) -> Callable[[], list[bytes]]:
    return lambda: [(CORPUS / name).read_bytes()]


# -- messages --------------------------------------------------------------------------------------------------------------


def _messages() -> list[Decoder]:
    from resilient.protocol import disk, messages

    unions = {
        "agent to driver": messages.AgentMessage | messages.AgentFailed,
        "driver to agent": messages.DriverMessage,
        "hello": messages.Hello,
        "disk process": disk.DiskRequest,
        "disk process news": disk.DiskNews,
        "daemon requests": protocol.DaemonRequest,
        "daemon news": protocol.DaemonNews,
        "workers to daemon": worker_news.WorkerNews,
        "authenticate": handshake.Authenticate,
        "challenge": handshake.Challenge,
        "response": handshake.Response,
        "read request": shard_reads.ReadRequest,
        "read reply": shard_reads.ReadReply,
    }

    def one(name: str, union: Any) -> Decoder:
        def call(data: bytes) -> None:
            decoder: framing.Decoder[Any] = framing.Decoder(union)
            for message in decoder.feed(data):
                assert decoder.feed(framing.encode(message)), message

        return Decoder(name, lambda: encoded(union), call, (framing.NotAMessage,))

    def candidates() -> list[bytes]:
        return [messages.pack(samples(messages.Candidate, of_each=number)) for number in (1, 3)]

    def packed(data: bytes) -> bytes:
        return zlib.compress(data)

    keys = {handshake.DRIVER_AGENT: "a" * 64}
    client = handshake.Client(keys[handshake.DRIVER_AGENT], handshake.DRIVER_AGENT, "node 1, agent 1", "10.0.0.1 17")

    def server(data: bytes) -> bytes:
        return handshake.Server(keys, handshake.Nonces(), "10.0.0.1 17").challenge(data)

    refusals = (framing.NotAMessage, handshake.Refused)
    return [
        *(one(name, union) for name, union in unions.items()),
        Decoder("handshake of a server", lambda: [client.opening], server, refusals),
        Decoder("handshake of a client", lambda: [server(client.opening)], client.respond, refusals),
        Decoder("candidates", candidates, messages.unpack, (ValueError,)),
        Decoder(
            "candidates, packed anew",
            lambda: [zlib.decompress(each) for each in candidates()],
            lambda data: messages.unpack(packed(data)),
            (ValueError,),
        ),
    ]


# -- checkpoints -----------------------------------------------------------------------------------------------------------

_ARRAYS = [
    arrange("model/weight", "float32", (64, 300), (16, 300)),
    arrange("model/bias", "bfloat16", (64,), (16,)),
    arrange("step", "int64", (), ()),
]


def _documents() -> dict[str, bytes]:
    found = metadata.documents(_ARRAYS)
    return {**found, metadata.NAME: metadata.with_attributes(found[metadata.NAME], 7, 2, {"step": 7, "seed": [1, 2.5, None]})}


def _shard_files() -> dict[str, bytes]:
    return {shard.path: _shard_file(info, shard) for info in _ARRAYS for shard in info.shards.values()}


def _shard_file(info: ArrayInfo, shard: Any) -> bytes:
    body = bytearray(len(shard.slots) * info.slot_bytes)
    slots.seal(info, memoryview(body))
    return bytes(shard.head + body)


def _entry(info: ArrayInfo, shard: Any, data: bytes) -> FileEntry:
    sums = slots.seals(info, memoryview(bytearray(data[info.first_slot :])))
    return FileEntry(len(data), crc32c.crc32c(data), shard.chunks_crc32c(dict(zip(shard.slots, sums, strict=True))))


def _sealed(text: bytes) -> bytes:
    """The same document under a checksum that fits."""
    tail = len(b',\n "crc32c": "00000000"\n}\n')
    if text.endswith(b'"\n}\n') and len(text) > tail and text[-tail:].startswith(b',\n "crc32c"'):
        return text[:-tail] + b',\n "crc32c": "%08x"\n}\n' % crc32c.crc32c(text[:-tail])
    try:
        found = json.loads(text)
        return sealed.seal({key: value for key, value in found.items() if key != "crc32c"})
    except (ValueError, AttributeError, UnicodeEncodeError, RecursionError):
        return text


def _checkpoints(directory: Path) -> list[Decoder]:
    from checkpoint import fence
    from checkpoint.tiers import blueprint, session
    from checkpoint.tools import listing, locations
    from checkpoint.tools.refusal import Refusal
    from checkpoint.verification import verify

    documents = _documents()
    step = directory / "checkpoints" / "step-00000007"
    files = {**documents, **_shard_files()}
    entries = {name: FileEntry(len(data), crc32c.crc32c(data)) for name, data in documents.items()}
    entries |= {shard.path: _entry(info, shard, files[shard.path]) for info in _ARRAYS for shard in info.shards.values()}
    described = manifest.encode(Manifest(7, 2, entries))
    for name, data in {**files, manifest.NAME: described}.items():
        (step / name).parent.mkdir(parents=True, exist_ok=True)
        (step / name).write_bytes(data)
    sums = {"model/weight/c.0.0": {0: 1, 1: 2}, "step/c": {0: 9}}
    part = shard_manifest.encode(shard_manifest.ShardManifest(7, 2, 0, 2, 4096, {name: entries[name] for name in documents}, sums))
    common, mine = directory / "blueprint", directory / "blueprint" / "slots-rank0.json"
    common.mkdir(exist_ok=True)
    digest = blueprint.arrays_digest(_ARRAYS)
    blueprint.write_arrays(common, _ARRAYS, documents)
    blueprint.write_slots(common, 0, 1, digest, {"model/weight/c.0.0": [0, 1]}, (0, 2))
    arrays_text, slots_text = blueprint.arrays_path(common, digest).read_bytes(), mine.read_bytes()
    held = {
        "tier": "ram",
        "step": 7,
        "holdings": [{"directory": "/dev/shm/x"}, {"address": "10.0.0.1:5", "path": "/x", "key": "k"}],
    }
    told = {
        "node": 0,
        "nodes": 2,
        "generation": 1,
        "first_rank": 0,
        "ranks": 1,
        "directory": "/dev/shm/x",
        "mtbf_s": 9.5,
        "candidates": [held],
    }
    told["tiers"] = [
        {"name": "ram", "durable": False, "every_steps": 1, "every_s": None},
        {"name": "durable", "durable": True, "every_steps": "auto", "every_s": None},
    ]

    def whole(path: Path) -> object:
        found = manifest.read(path.parent)
        return found.size_bytes

    def of_blueprint(path: Path) -> object:
        found = blueprint.read(common, digest, [0])
        blueprint.announced(common, 0)
        return found.size_bytes, found.digest

    def arrays_of_blueprint(path: Path) -> object:
        mine.write_bytes(slots_text)
        return of_blueprint(path)

    def slots_of_blueprint(path: Path) -> object:
        blueprint.arrays_path(common, digest).write_bytes(arrays_text)
        return of_blueprint(path)

    def shards(data: bytes) -> object:
        found = metadata.parse(step, data)
        return [(shard.path, shard.size_bytes) for info in found.arrays.values() for shard in info.shards.values()]

    shard_path = _ARRAYS[0].shards[(0, 0)].path

    def shard_file(path: Path) -> object:
        return verify(step)

    def listed(path: Path) -> object:
        return listing.entries(path.parent)

    return [
        Decoder("part.json", lambda: [part], lambda data: shard_manifest.decode(step, data), (DamagedCheckpoint,), _sealed),
        Decoder("part.json, listed", lambda: [part], _in_file(directory / "parts" / "step-00000007" / "part.json", listed), ()),
        Decoder(
            "manifest.json",
            lambda: [described],
            _in_file(directory / "manifests" / "step-00000007" / "manifest.json", whole),
            (DamagedCheckpoint,),
            _sealed,
        ),
        Decoder("array metadata", lambda: [documents[metadata.NAME]], shards, (DamagedCheckpoint,)),
        Decoder(
            "shard file",
            lambda: [files[shard_path][:8192]],
            _shard_call(step / shard_path, files[shard_path], shard_file),
            (DamagedCheckpoint,),
        ),
        Decoder(
            "arrays of a blueprint",
            lambda: [arrays_text],
            _in_file(blueprint.arrays_path(common, digest), arrays_of_blueprint),
            (ValueError, OSError),
        ),
        Decoder("slots of a blueprint", lambda: [slots_text], _in_file(mine, slots_of_blueprint), (ValueError, OSError)),
        Decoder(
            "session",
            lambda: [json.dumps(told).encode()],
            _in_file(directory / "session.json", session.read),
            (ValueError, OSError),
        ),
        Decoder(
            "fence",
            lambda: [b"17\n"],
            _in_file(directory / "fence" / fence.FENCE, lambda path: fence.newest_generation(path.parent)),
            (CheckpointError,),
        ),
        Decoder(
            "tiers in storage.json",
            _corpus("storage.json"),
            _in_file(directory / "tiers" / "storage.json", lambda path: locations.tiers(path.parent)),
            (Refusal,),
        ),
    ]


def _shard_call(path: Path, real: bytes, use: Callable[[Path], object]) -> Call:
    """The first pages of a shard file are the input; the rest is real."""

    def call(data: bytes) -> object:
        path.write_bytes(data + real[len(data) if len(data) < 8192 else 8192 :])
        return use(path)

    return call


# -- the run directory -----------------------------------------------------------------------------------------------------


def _campaigns(directory: Path) -> list[Decoder]:
    from rich.console import Console

    from resilient import diagnosis, evacuate, ledger, spill, storage
    from resilient.config import Config
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
    from resilient.picture import picture
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
        Decoder("identity", lambda: [msgspec.json.encode(kept)], _in_file(run_dir / "identity.json", known), (ValueError,)),
        Decoder("past", kept_past, use_past),
        Decoder("events.jsonl", _corpus("events.jsonl"), _in_file(run_dir / ledger.EVENTS, events)),
        Decoder("metrics.jsonl", _corpus("metrics.jsonl"), _in_file(run_dir / ledger.METRICS, metrics)),
        Decoder(
            "storage.json",
            _corpus("storage.json"),
            _in_file(run_dir / storage.FILE, lambda path: storage.read(path.parent)),
            (ValueError, OSError),
        ),
        Decoder("spill file", lambda: [spilled], _in_file(run_dir / "spill" / "1.jsonl", spill_file.items)),
        Decoder("records left behind", lambda: [leaving_text], _in_file(leaving, lambda _: spill.take_in(left, Book()))),
        Decoder("lease", lambda: [owner], _in_file(run_dir / lease.LEASE, lease.read)),
        Decoder(
            "evacuate.json",
            lambda: [evacuation],
            _in_file(run_dir / evacuate.FILE, lambda path: evacuate.requested(path.parent, "c0ffee")),
            evacuate.MALFORMED,
        ),
        Decoder("archive of logs", lambda: [packed], _in_file(run_dir / "damaged.tar.zst", unpacked), (archive.DamagedArchive,)),
    ]


# -- configs and experiments -----------------------------------------------------------------------------------------------

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


def _reports(run_dir: Path) -> list[Decoder]:
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
        Decoder("report: events.jsonl", _corpus("events.jsonl"), _in_file(run_dir / ledger.EVENTS, report)),
        Decoder("report: metrics.jsonl", _corpus("metrics.jsonl"), _in_file(run_dir / ledger.METRICS, report)),
        Decoder("watch", _corpus("events.jsonl"), _in_file(run_dir / ledger.EVENTS, watched)),
    ]


def _configs(directory: Path) -> list[Decoder]:
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
        Decoder("config", lambda: [_CONFIG, b"name: x\n"], _in_file(directory / "fuzzed.yaml", config), (ConfigError,)),
        Decoder("override", lambda: [b"name=x\n5", b"data.split.0=3\n7"], override, (ConfigError,)),
        Decoder(
            "experiment",
            lambda: [_EXPERIMENT],
            _in_file(directory / "experiment.yaml", experiment.read),
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
            _in_file(directory / "record" / record.RECORD, lambda path: record.read(path.parent)),
        ),
    ]


def _target() -> Any:
    from chaos.injectors.context import Target

    return Target(rank=1)


# -- Slurm -----------------------------------------------------------------------------------------------------------------

_SCRIPT = b"""#!/bin/bash
#SBATCH --time=00:20:00 --signal=B:USR1@60
module load GCC   # before the environment
export NCCL_IB_TIMEOUT=50
ARGS=(--save "$SCRATCH/$SLURM_JOB_ID" --exit-duration-in-mins 60)
cat <<'END' > x
text (
END
for n in $(hostname); do srun -w "$n" bash -c "python a.py ${ARGS[@]:-x} (" 2>&1 | tee log & done
wait $!
"""
_SCONTROL = b"""JobId=17 JobName=x Requeue=1 JobState=RUNNING Reason=None NodeList=n[1-3,07],m1 BatchHost=n1 NumNodes=5
JobId=18 HetJobId=17 HetJobOffset=1 JobName=x Requeue=1 JobState=RUNNING Reason=None NodeList=m2 BatchHost=m2 NumNodes=1
"""
_RESERVATIONS = b"""ReservationName=a StartTime=2026-11-23T10:00:00 EndTime=2026-11-24T10:00:00 Nodes=n[1-3],m Flags=MAINT
ReservationName=b StartTime=2026-11-25T10:00:00 EndTime=2026-11-26T10:00:00 Nodes=n2 NodeCnt=1 Flags=MAINT State=INACTIVE
"""
_SQUEUE = b"""17                              RUNNING                 2026-11-23T10:00:00     N/A                     None
18                              PENDING                 N/A                     2026-11-23T10:00:00     Dependency, and more
"""
_CHAIN = b"""{"t": 1.5, "what": "begun", "name": "quick-1234"}
{"t": 2.5, "what": "submitted", "job": "17", "after": null}
{"t": 3.5, "what": "started", "job": "17", "step": 0}
{"t": 4.5, "what": "ended", "job": "17", "exit_code": 75}
{"t": 4.5, "what": "cancelled", "job": "18"}
{"t": 5.5, "what": "stopped"}
{"t": 6.5, "what": "ended", "job": "19", "exit_code": 70}
"""


def _slurm(directory: Path) -> list[Decoder]:
    from resilient import ledger
    from resilient.batch.job import read as read_job
    from resilient.batch.shell import NestedTooDeep
    from resilient.batch.traps import traps
    from resilient.exits import EnvironmentUnusable
    from resilient.slurm import badnodes, chain, history, hosts, maintenance, queue, roster
    from resilient.slurm.allocation import Allocation

    def records(path: Path) -> None:
        found = list(chain.whole(ledger.read(path)))
        folded = chain.fold(found)
        assert folded.stuck in (True, False)
        chain.name(found)
        jobs = history.history(found, queue.parse_queue(_SQUEUE.decode()))
        history.queued_s(found, jobs, [(0.0, 1.0)], 1.0, 10.0)

    def environ(data: bytes) -> None:
        names = (
            "SLURM_JOB_NODELIST",
            "SLURM_JOB_CPUS_PER_NODE",
            "SLURM_HET_SIZE",
            "SLURM_PROCID",
            "SLURM_STEP_ID",
            "SLURM_JOB_ID",
            "SLURMD_NODENAME",
        )
        Allocation.of(dict(zip(names, os.fsdecode(data).split("\n"), strict=False)), "n1")

    text = os.fsdecode
    return [
        Decoder("chain.jsonl", lambda: [_CHAIN], _in_file(directory / "chain.jsonl", records)),
        Decoder(
            "host list",
            lambda: [b"n[1-3,07],m1", b"a[1-2]b[01-12]", b"x"],
            lambda data: hosts.fold(hosts.expand(text(data))),
            (ValueError,),
        ),
        Decoder("CPU counts", lambda: [b"48(x3),24"], lambda data: hosts.counts(text(data)), (ValueError,)),
        Decoder("roster", lambda: [b"1:0:n[1-3];2:3:m1"], lambda data: roster.read(text(data)), (ValueError,)),
        Decoder(
            "roster variable",
            lambda: [b"1:0:n[1-3];2:3:m1"],
            lambda data: roster.seat_of({roster.VARIABLE: text(data)}, "n1"),
            (EnvironmentUnusable,),
        ),
        Decoder(
            "allocation",
            lambda: [b"n[1-2]\n4(x2)\n0\n0\n0\n17\nn1", b"n1\n4"[:4] + b"\n0\n0\n0\n17"],
            environ,
            (EnvironmentUnusable,),
        ),
        Decoder("batch script", lambda: [_SCRIPT], lambda data: traps(read_job(data.decode(errors="replace"))), (NestedTooDeep,)),
        Decoder("squeue", lambda: [_SQUEUE], lambda data: queue.parse_queue(text(data))),
        Decoder("scontrol", lambda: [_SCONTROL], lambda data: queue.parse_allotted(text(data)), (queue.SlurmSilent,)),
        Decoder("scontrol show reservation", lambda: [_RESERVATIONS], lambda data: list(maintenance.parse(text(data)))),
        Decoder(
            "scontrol show config",
            lambda: [b"x = 1\nKillWait               = 30 sec\n"],
            lambda data: queue.parse_kill_wait(text(data)),
        ),
        Decoder(
            "bad_nodes.json",
            lambda: [b'[{"host": "n1", "reason": "x", "t": 1.5, "until_t": 9e9}]'],
            _in_file(directory / "bad" / badnodes.FILE, lambda path: badnodes.bad_nodes(path.parent)),
        ),
    ]


# -- on a node -------------------------------------------------------------------------------------------------------------

_HEADER_BYTES = 512  # of the page that an input stands for: all words that there are


def _node(directory: Path) -> list[Decoder]:
    from resilient import heartbeat_region
    from resilient.agent import memory, recorder
    from resilient.standing import standing

    path = directory / "page"

    def pages() -> list[bytes]:
        path.unlink(missing_ok=True)
        agent = heartbeat_region.AgentRegion(path)
        worker = heartbeat_region.WorkerRegion(path)
        worker.enter(3)
        worker.beat(12)
        worker.report(None, {"step": 12, "loss": 0.5})
        worker.report("health", {"text": "x" * 40, "list": [1, None, {"a": True}]})
        worker.close()
        agent.close(keep_file=True)
        data = path.read_bytes()
        return [data[:_HEADER_BYTES] + data[4096 : 4096 + 400]]

    def region(data: bytes) -> None:
        fd = os.open(path, os.O_WRONLY)
        try:
            os.pwrite(fd, data[:_HEADER_BYTES].ljust(_HEADER_BYTES, b"\0"), 0)
            os.pwrite(fd, data[_HEADER_BYTES:][:2000].ljust(400, b"\0"), 4096)
        finally:
            os.close(fd)
        heartbeat_region.peek(path)
        for each in heartbeat_region.salvage(path):
            assert isinstance(each.t, float)
            assert isinstance(each.fields, dict)

    entry = {
        "process_group": ("0", "default_pg"),
        "collective_seq_id": 7,
        "p2p_seq_id": 0,
        "is_p2p": False,
        "profiling_name": "nccl:all_reduce",
    }
    entry |= {"input_sizes": ((3, 4),), "state": "scheduled", "retired": False, "frames": []}
    record = {
        "version": "2.5",
        "entries": [{**entry, "state": "completed", "retired": True}, entry],
        "pg_config": {"0": {"ranks": "[0, 1]"}},
    }
    answer = directory / "record.txt"
    answer.write_text("gloo: 2 collectives")

    return [
        Decoder("heartbeat region", pages, region, (ValueError, OSError)),
        Decoder(
            "standing of a rank",
            lambda: [msgspec.json.encode(standing(record)), b"null"],
            _in_file(directory / "record.standing", lambda _: recorder.standing_of(answer)),
        ),
        Decoder(
            "agent record",
            lambda: [b'{"pid": 5, "driver": "n1:5"}'],
            _in_file(directory / "agent.json", memory.read_record),
        ),
    ]


# -- data ------------------------------------------------------------------------------------------------------------------


def _data(directory: Path) -> list[Decoder]:
    from trainer import kernels
    from trainer.data import documents, indexed
    from trainer.data.errors import DataError
    from trainer.evaluation.records import FILE, Records
    from trainer.evaluation.sizes import token_sizes
    from trainer.sources import tokens_of

    prefix = directory / "data" / "corpus"
    prefix.parent.mkdir()

    def index() -> list[bytes]:
        with indexed.IndexedWriter(prefix, indexed.token_type(300)) as writer:
            for length in (3, 1, 20):
                writer.add(list(range(length)))
            writer.commit()
        return [indexed.idx_path(prefix).read_bytes()]

    def opened(_: Path) -> object:
        found = indexed.IndexedDataset(prefix)
        return [found.tokens[found.boundary(each) : found.boundary(each + 1)].sum() for each in range(len(found))]

    vocab = {"a": 0, "b": 1, "<|endoftext|>": 2}
    saved = json.dumps(
        {"model": {"type": "BPE", "vocab": vocab, "merges": []}, "added_tokens": [{"id": 2, "content": "<|endoftext|>"}]}
    ).encode()

    def tokens(path: Path) -> object:
        from trainer import sources

        sources._tokens_in.cache_clear()
        return tokens_of(path), token_sizes(path, 300)

    line = {
        "step": 40,
        "t": 1.5,
        "text": "valid",
        "tokens": 384,
        "loss": 2.5,
        "bits_per_byte": None,
        "corpora": {"a": {"loss": 2.5}},
    }

    def evaluated(_: Path) -> object:
        return Records(directory).steps("valid")

    work = kernels.Work("cpu", "2", "bfloat16", 4, 8, 8, 64, 512, False, 0.0, False, False)
    choice = {"work": asdict(work), "kernel": "sdpa_flash", "seconds": {"sdpa_flash": 1e-3}}

    return [
        Decoder(
            "attention.json",
            lambda: [json.dumps(choice).encode()],
            _in_file(directory / kernels.FILE, lambda path: kernels.remembered(path, work)),
        ),
        Decoder("evaluations.jsonl", lambda: [json.dumps(line).encode() + b"\n"], _in_file(directory / FILE, evaluated)),
        Decoder("index of a dataset", index, _in_file(indexed.idx_path(prefix), opened), (DataError,)),
        Decoder(
            "tokenizer.json",
            lambda: [saved, json.dumps(vocab).encode(), json.dumps({chr(256 + byte): byte for byte in range(300)}).encode()],
            _in_file(directory / "tokenizer.json", tokens),
            (DataError,),
        ),
        Decoder(
            "line of text",
            lambda: [b'{"text": "x", "meta": {"a": [1]}}'],
            lambda data: documents.text_of(documents.Piece("x.jsonl", 2, "text", data, True)),
            (DataError,),
        ),
    ]


# -- checkpoints of others -------------------------------------------------------------------------------------------------


def _foreign(directory: Path) -> list[Decoder]:
    """Files of Megatron-LM and of torch.distributed.checkpoint."""
    import argparse
    import pickle

    import torch
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    from trainer.conversion.dcp_files import DCPFiles
    from trainer.conversion.families import ImportRefused
    from trainer.conversion.megatron_args import model_of
    from trainer.conversion.pickled import load_part
    from trainer.conversion.rank_files import RankFiles

    matrix, vector = torch.arange(12.0).reshape(3, 4), torch.ones(4)

    def saved(value: object) -> bytes:
        buffer = io.BytesIO()
        torch.save(value, buffer)
        return buffer.getvalue()

    def of_rank() -> list[bytes]:
        args = argparse.Namespace(hidden_size=4, swiglu=False, params_dtype=torch.bfloat16)
        model = {"decoder.layers.0.input_layernorm.weight": vector, "embedding.word_embeddings.weight": matrix}
        moments = {0: {"exp_avg": matrix + 1, "exp_avg_sq": matrix + 2}, 1: {"exp_avg": vector, "exp_avg_sq": vector * 2}}
        optimizer = {"state": moments, "param_groups": [{"params": [0]}, {"params": [1]}]}
        common = {"args": args, "iteration": 3, "checkpoint_version": 3.0}
        old = {"language_model": {"encoder": {"layers.0.input_norm.weight": vector}}}
        return [saved({**common, "model": model, "optimizer": optimizer}), saved({**common, "model": old})]

    def ranks(path: Path) -> None:
        opened = RankFiles(path.parents[1])
        for name in opened.names:
            for kind in ("weight", *opened.kinds):
                assert opened.read(name, kind).sum() is not None

    chunks = [saved(matrix[:1].clone()), saved(matrix[1:].clone())]
    distributed = directory / "dcp"

    def description() -> list[bytes]:
        blocks = [ChunkStorageMetadata(torch.Size([start, 0]), torch.Size([rows, 4])) for start, rows in ((0, 1), (1, 2))]
        tensor = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([3, 4]), blocks)
        places = {
            MetadataIndex("a", block.offsets, number): _StorageInfo("__0_0.distcp", number * len(chunks[0]), len(chunks[number]))
            for number, block in enumerate(blocks)
        }
        return [pickle.dumps(Metadata({"a": tensor}, {"a": ("a",)}, places)), pickle.dumps(Metadata({}, None, {}), 2)]

    def described(path: Path) -> None:
        (distributed / "__0_0.distcp").write_bytes(b"".join(chunks))
        opened = DCPFiles(path.parent)
        for name in opened.tensors:
            assert opened.read(name).sum() is not None

    def part(path: Path) -> None:
        load_part(path, 0, max(1, path.stat().st_size))

    def arguments(data: bytes) -> object:
        try:
            found = json.loads(data)
        except (ValueError, RecursionError):
            return None
        return model_of(found) if isinstance(found, dict) else None

    gpt = {
        **{"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "ffn_hidden_size": 24, "kv_channels": 4},
        **{"max_position_embeddings": 8, "padded_vocab_size": 64, "vocab_size": 61, "make_vocab_size_divisible_by": 64},
        **{"swiglu": True, "normalization": "RMSNorm", "position_embedding_type": "rope", "num_query_groups": 2},
        **{"group_query_attention": True, "add_bias_linear": False, "rotary_base": 10000, "norm_epsilon": 1e-5},
    }
    rank = directory / "iter_0000003" / "mp_rank_00" / "model_optim_rng.pt"
    return [
        Decoder("file of a rank of Megatron-LM", of_rank, _in_file(rank, ranks), (ImportRefused, OSError)),
        Decoder("description of DCP", description, _in_file(distributed / ".metadata", described), (ImportRefused, OSError)),
        Decoder("chunk of DCP", lambda: chunks, _in_file(directory / "part", part), (ImportRefused, OSError)),
        Decoder("arguments of Megatron-LM", lambda: [json.dumps(gpt).encode()], arguments, (ImportRefused,)),
    ]
