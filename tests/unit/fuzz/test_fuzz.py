"""Whatever a decoder is given, it answers rightly or with its own error, in bounded time and memory."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from fuzzing import Witness

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
FEW, MANY = 60, 5_000  # inputs of each decoder, and a tenth as many by Hypothesis; so many for each of `--rounds`

DECODERS = (
    "agent to driver", "driver to agent", "hello", "disk process", "disk process news", "daemon requests", "daemon news",
    "workers to daemon", "authenticate", "challenge", "response", "handshake of a client", "handshake of a server",
    "read request", "read reply", "candidates", "candidates, packed anew",
    "part.json", "part.json, listed", "manifest.json", "array metadata", "shard file", "arrays of a blueprint",
    "slots of a blueprint", "session", "fence", "tiers in storage.json",
    "identity", "past", "events.jsonl", "metrics.jsonl", "storage.json", "spill file", "records left behind", "lease",
    "evacuate.json", "archive of logs", "report: events.jsonl", "report: metrics.jsonl", "watch", "batch script",
    "config", "override", "experiment", "injection request", "chaos.jsonl",
    "chain.jsonl", "host list", "CPU counts", "roster", "roster variable", "allocation", "squeue", "scontrol",
    "scontrol show reservation", "scontrol show config", "bad_nodes.json",
    "heartbeat region", "standing of a rank", "agent record",
    "index of a dataset", "tokenizer.json", "line of text", "evaluations.jsonl", "attention.json",
    "file of a rank of Megatron-LM", "description of DCP", "chunk of DCP", "arguments of Megatron-LM",
)  # fmt: skip


@pytest.fixture
def ram(tmp_path: Path) -> Iterator[Path]:
    """A directory in RAM: the inputs of many decoders are files."""
    path = Path(f"/dev/shm/resilient-test-fuzz-{os.getpid()}-{tmp_path.name}")
    path.mkdir(mode=0o700)
    yield path
    subprocess.run(["rm", "-rf", str(path)], check=True)


def fuzz(ram: Path, count: int, names: Sequence[str] = (), *, code: Path = HERE) -> list[str]:
    """Give decoders damaged inputs in a process of its own; their names. Fails with the input that was too much."""
    witness = ram / "witness"
    done = subprocess.run(
        [sys.executable, str(code / "fuzzing.py"), str(count), "1", str(witness), *names],
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
    )
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        pytest.fail(f"ended by {name}, with {Witness.seen(witness)!r}\n{done.stderr[-3000:]}")
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-3000:]
    return [line.removeprefix("decoder: ") for line in done.stdout.splitlines() if line.startswith("decoder: ")]


def test_decoders_answer_damaged_inputs_with_their_own_errors_and_the_second_tier_has_each_of_them(ram: Path):
    assert sorted(fuzz(ram, FEW)) == sorted(DECODERS)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_answers_thousands_of_damaged_inputs_with_its_own_errors(name: str, rounds: int, ram: Path):
    assert fuzz(ram, MANY * rounds, [name]) == [name]


@pytest.mark.parametrize(
    ("deed", "told"),
    [
        ("raise KeyError(data)", "KeyError"),
        ("bytearray(300 << 20)", "MemoryError"),
        ("sum(range(1 << 50))", "ended by SIGPROF, with ('bad', b"),
        ("import ctypes; ctypes.string_at(0)", "ended by SIGSEGV, with ('bad', b"),
    ],
)
def test_what_no_decoder_may_do_is_seen(deed: str, told: str, ram: Path):
    for name in ("fuzzing.py", "damaged.py"):
        (ram / name).write_text((HERE / name).read_text().replace("CPU_S = 10.0", "CPU_S = 0.2"))
    (ram / "decoder.py").write_text((HERE / "decoder.py").read_text())
    (ram / "decoders.py").write_text(f"""
from dataclasses import dataclass

def call(data):
    if data != b"real":
        {deed}

@dataclass
class Decoder:
    name, errors, repair = "bad", (ValueError,), None
    inputs, call = staticmethod(lambda: [b"real"]), staticmethod(call)

def decoders(directory):
    return [Decoder()]
""")
    with pytest.raises((AssertionError, pytest.fail.Exception)) as failed:
        fuzz(ram, 1, code=ram)
    assert told in str(failed.value)
