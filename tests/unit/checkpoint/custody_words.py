"""The words of the driver's custody, which are dictionaries, as messages of the snapshot daemon, and the other way round."""

from collections.abc import Mapping
from typing import Any

from checkpoint.protocol import (
    Cancel,
    Committed,
    DaemonNews,
    DaemonRequest,
    Discard,
    Flushed,
    Held,
    Inventory,
    JobFailed,
    Listening,
    NodeShard,
    NoRoom,
    Replicate,
    Retain,
    Skipped,
    SnapshotKey,
    Stale,
    StartJob,
    TierTrouble,
    TierWell,
)


def request(order: Mapping[str, Any], generation: int) -> DaemonRequest:
    """An order as a message."""
    match order["do"]:
        case "keep":
            return Retain(
                generation=order["generation"],
                tier=order["tier"],
                steps=tuple(order["steps"]),
                upto=order["upto"],
                left_out=tuple(order["left_out"]),
            )
        case "void":
            return Discard(generation=generation, step=order["step"], invalid_generation=order["generation"])
        case "cancel":
            return Cancel(generation=generation, job_id=order["id"])
        case "replicate":
            return Replicate(
                generation=generation,
                job_id=order["id"],
                tier=order["tier"],
                key=SnapshotKey(order["step"], order["generation"]),
                shard=order["owner"],
                address=order["address"],
                directory=order["directory"],
            )
        case "copy" | "flush" | "commit" as kind:
            return StartJob(
                generation=order["attempt"],
                kind=kind,
                job_id=order["id"],
                tier=order["tier"],
                key=SnapshotKey(order["step"], order["generation"]),
                shard=order["owner"],
            )
    raise ValueError(order)


def entry(shard: NodeShard) -> dict[str, Any]:
    """What is held, in custody's words."""
    return {
        "tier": shard.tier,
        "directory": shard.directory,
        "step": shard.key.step,
        "generation": shard.key.generation,
        "owner": shard.shard,
        "nodes": shard.shards,
        "bytes": shard.size_bytes,
        "replica": shard.replica,
    }


def news(said: DaemonNews) -> dict[str, Any]:
    """News in custody's words."""
    match said:
        case Listening():
            return {"what": "listening", "address": said.address}
        case Inventory():
            return {"what": "inventory", "address": said.address, "parts": [entry(shard) for shard in said.shards]}
        case Held():
            job = {} if said.job_id is None else {"id": said.job_id}
            found = {**entry(said.shard), **job, "stall_s": said.stall_s, "write_s": said.write_s}
            return {"what": "held", **found, "wants": list(said.wants), "again": said.again}
        case Skipped():
            return {"what": "skipped", "step": said.step, "generation": said.generation, "why": said.reason}
        case Stale():
            return {"what": "stale", "step": said.step, "generation": said.generation, "before": said.before}
        case Flushed() | Committed():
            files = {"files": said.files} if isinstance(said, Committed) else {}
            what = "committed" if files else "flushed"
            return {"what": what, **_job(said), "bytes": said.size_bytes, "write_s": said.write_s, **files}
        case JobFailed():
            detail = "cancelled" if said.cancelled else "superseded" if said.superseded else said.reason
            return {"what": "failed", "job": said.kind, **_job(said), "detail": detail, "unreachable": said.unreachable}
        case TierTrouble():
            return {"what": "trouble", "tier": said.tier, "detail": said.detail, "errno": said.errno}
        case TierWell():
            return {"what": "well", "tier": said.tier, "down_s": said.down_s}
        case NoRoom():
            return {"what": "no_room", "bytes": said.size_bytes, "places": list(said.places)}
    return {"what": type(said).__name__.lower()}


def _job(said: Flushed | Committed | JobFailed) -> dict[str, Any]:
    return {
        "id": said.job_id,
        "tier": said.tier,
        "step": said.key.step,
        "generation": said.key.generation,
        "owner": said.shard,
    }
