"""What lies in the memory of a node, and records of agents."""

import os
from pathlib import Path

import msgspec
from decoder import Decoder, in_file

_HEADER_BYTES = 512  # of the page that an input stands for: all words that there are


def node(directory: Path) -> list[Decoder]:
    from resilient.agent import memory, recorder
    from resilient.heartbeat import agent_side, worker_side
    from resilient.heartbeat import region as heartbeat_region
    from resilient.recovery.standing import standing

    path = directory / "page"

    def pages() -> list[bytes]:
        path.unlink(missing_ok=True)
        agent = agent_side.AgentRegion(path)
        worker = worker_side.WorkerRegion(path)
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
            in_file(directory / "record.standing", lambda _: recorder.standing_of(answer)),
        ),
        Decoder(
            "agent record",
            lambda: [b'{"pid": 5, "driver": "n1:5"}'],
            in_file(directory / "agent.json", memory.read_record),
        ),
    ]
