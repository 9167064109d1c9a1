"""Messages between processes."""

from typing import Any

import zstandard
from decoder import Decoder
from samples import encoded, samples

from checkpoint import framing, handshake, protocol, shard_reads, worker_news


def messages() -> list[Decoder]:
    from resilient.protocol import candidates, disk, messages

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

    def packed_candidates() -> list[bytes]:
        return [candidates.pack(samples(candidates.Candidate, of_each=number)) for number in (1, 3)]

    def packed(data: bytes) -> bytes:
        return zstandard.ZstdCompressor().compress(data)

    keys = {handshake.DRIVER_AGENT: "a" * 64}
    client = handshake.Client(keys[handshake.DRIVER_AGENT], handshake.DRIVER_AGENT, "node 1, agent 1", "10.0.0.1 17")

    def server(data: bytes) -> bytes:
        return handshake.Server(keys, handshake.Nonces(), "10.0.0.1 17").challenge(data)

    refusals = (framing.NotAMessage, handshake.Refused)
    return [
        *(one(name, union) for name, union in unions.items()),
        Decoder("handshake of a server", lambda: [client.opening], server, refusals),
        Decoder("handshake of a client", lambda: [server(client.opening)], client.respond, refusals),
        Decoder("candidates", packed_candidates, candidates.unpack, (ValueError,)),
        Decoder(
            "candidates, packed anew",
            lambda: [zstandard.ZstdDecompressor().decompress(each) for each in packed_candidates()],
            lambda data: candidates.unpack(packed(data)),
            (ValueError,),
        ),
    ]
