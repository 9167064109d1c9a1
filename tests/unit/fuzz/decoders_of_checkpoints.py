"""Files of checkpoints, and what processes say about them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import crc32c
from decoder import Call, Decoder, corpus, in_file

from checkpoint import manifest, metadata, sealed, shard_manifest, slots
from checkpoint.errors import CheckpointError, DamagedCheckpoint
from checkpoint.layout import ArrayInfo, arrange
from checkpoint.manifest import FileEntry, Manifest

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


def checkpoints(directory: Path) -> list[Decoder]:
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
        "generation": 2,
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
        Decoder("part.json, listed", lambda: [part], in_file(directory / "parts" / "step-00000007" / "part.json", listed), ()),
        Decoder(
            "manifest.json",
            lambda: [described],
            in_file(directory / "manifests" / "step-00000007" / "manifest.json", whole),
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
            in_file(blueprint.arrays_path(common, digest), arrays_of_blueprint),
            (ValueError, OSError),
        ),
        Decoder("slots of a blueprint", lambda: [slots_text], in_file(mine, slots_of_blueprint), (ValueError, OSError)),
        Decoder(
            "session",
            lambda: [json.dumps(told).encode()],
            in_file(directory / "session.json", session.read),
            (ValueError, OSError),
        ),
        Decoder(
            "fence",
            lambda: [b"17\n"],
            in_file(directory / "fence" / fence.FENCE, lambda path: fence.newest_generation(path.parent)),
            (CheckpointError,),
        ),
        Decoder(
            "tiers in storage.json",
            corpus("storage.json"),
            in_file(directory / "tiers" / "storage.json", lambda path: locations.tiers(path.parent)),
            (Refusal,),
        ),
    ]


def _shard_call(path: Path, real: bytes, use: Callable[[Path], object]) -> Call:
    """The first pages of a shard file are the input; the rest is real."""

    def call(data: bytes) -> object:
        path.write_bytes(data + real[len(data) if len(data) < 8192 else 8192 :])
        return use(path)

    return call
