"""What workers may go on from is small on the wire, and is what it was."""

import pytest
import zstandard

from checkpoint.framing import Decoder, encode
from checkpoint.protocol import SnapshotKey
from resilient.protocol.candidates import PACKED_BYTES, Candidate, Holder, encode_start, last_member, pack, unpack
from resilient.protocol.messages import DriverMessage, Start

KEY = SnapshotKey(5, 2)


def test_candidates_survive_packing_and_thousands_of_nodes_take_little_room():
    shards = tuple(
        (Holder(node, f"10.0.{node // 256}.{node % 256}:4711", f"/dev/shm/user/resilient-ab12/node{node}/step-00000012"),)
        for node in range(2048)
    )
    wanted = (Candidate(key=KEY, tier="ram", shards=shards),)
    packed = pack(wanted)
    assert unpack(packed) == wanted
    assert len(packed) < 12_000
    start = Start(
        generation=1,
        node_rank=0,
        nodes=2,
        master_addr="a",
        master_port=1,
        collective_timeout_s=9.0,
        report_s=0.2,
        mtbf_s=9.0,
        candidates=packed,
    )
    assert Decoder[DriverMessage](DriverMessage).feed(encode(start)) == [start]
    assert unpack(b"") == ()


def of_unknown_size() -> bytes:
    return zstandard.ZstdCompressor(write_content_size=False).compress(b"[]")


def too_large() -> bytes:
    return zstandard.ZstdCompressor().compress(b" " * (PACKED_BYTES + 1))


@pytest.mark.parametrize(
    "packed",
    [pack([Candidate(key=KEY, tier="ram", shards=())])[:-3], b"[]", of_unknown_size(), too_large()],
    ids=["cut", "plain", "unknown", "large"],
)
def test_what_is_no_list_of_candidates_is_told(packed: bytes):
    with pytest.raises(ValueError, match="not a list of candidates"):
        unpack(packed)


@pytest.mark.parametrize("packed", [b"", pack([Candidate(key=KEY, tier="ram", shards=())])], ids=["none", "some"])
def test_candidates_are_encoded_once_for_all_nodes_and_arrive_as_they_were(packed: bytes):
    last_member.cache_clear()
    common = {"nodes": 3, "master_addr": "a", "master_port": 1, "collective_timeout_s": 9.0, "report_s": 0.2, "mtbf_s": 9.0}
    starts = [
        Start(generation=1, node_rank=node, candidates=packed, first_rank=2 * node, devices=(0, 1), skip=((3, 4),), **common)
        for node in range(3)
    ]
    assert Decoder[DriverMessage](DriverMessage).feed(b"".join(map(encode_start, starts))) == starts
    assert last_member.cache_info().misses == bool(packed)
