"""Without `chaos.allow` no fault is injected: not by a message, a variable, an order or an injector, whichever fault it is."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from samples import samples, structures

from chaos import faults
from chaos.fault import Inside
from chaos.injectors import injector, inside
from chaos.injectors.context import Target
from chaos.injectors.injector import InjectionRequest
from checkpoint import protocol, shard_reads, worker_news
from checkpoint.framing import Decoder, NotAMessage
from resilient.config import dump, layout, load
from resilient.driver.agents import agent_command
from resilient.protocol import disk, messages
from resilient.worker import CHAOS_VARIABLE

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[3]
UNIONS = {
    "agent to driver": messages.AgentMessage | messages.AgentFailed,
    "driver to agent": messages.DriverMessage,
    "driver to disk process": disk.DiskRequest,
    "disk process to driver": disk.DiskNews,
    "to the daemon": protocol.DaemonRequest,
    "daemon to driver": protocol.DaemonNews,
    "workers to daemon": worker_news.WorkerNews,
    "daemon to daemon": shard_reads.ReadRequest,
}
WORDS = ("chaos", "fault", "inject", "strike", "experiment", *faults.names())


def config_of(directory: Path, *, allow: bool) -> Path:
    """A run directory of a campaign that runs nowhere."""
    path = directory / "config.yaml"
    path.write_text(f"run_dir: {directory}\ncluster: {{device: cpu, procs_per_node: 1}}\nchaos: {{allow: {str(allow).lower()}}}\n")
    path.write_text(dump(load(path, [])))
    return path


@pytest.mark.parametrize("union", UNIONS)
def test_no_message_names_a_fault_and_none_is_taken_for_one(union: str):
    for structure in structures(UNIONS[union]):
        names = [structure.tag, *(field.encode_name for field in structure.fields)]
        assert not [name for name in names for word in WORDS if word in str(name)], structure.cls
    decoder: Decoder[object] = Decoder(UNIONS[union])  # type: ignore[type-var]
    for word in WORDS:
        for line in ({"type": word}, {"type": word, "generation": 1, "rank": 0}, {"fault": word}, {"type": "chaos", "fault": word}):
            with pytest.raises(NotAMessage):
                decoder.decode(json.dumps(line).encode())
    real = samples(UNIONS[union], of_each=1)
    for message in real:
        with pytest.raises(NotAMessage):
            decoder.decode(msgspec.json.encode({**msgspec.to_builtins(message), "chaos": {"allow": True}}))


TELLING = """
import sys
sys.modules["chaos"] = None  # an import of it, by whatever name, is an ImportError from here on
from control_play import Play
from samples import samples
from resilient.protocol import messages
words = tuple(sys.argv[1].split())
told = 0
for message in samples(messages.AgentMessage, of_each=20, words=words):
    play = Play()
    play.start()
    if isinstance(message, messages.Hello):
        continue
    for effect in play.deliver(0, message):
        assert type(effect).__module__ == "resilient.outbox", effect
    told += 1
assert not [name for name in sys.modules if name.startswith("chaos.")]
print(told)
"""


def test_whatever_an_agent_says_the_core_imports_nothing_of_chaos():
    path = os.pathsep.join(map(str, [HERE, HERE.parent / "control", ROOT]))
    done = subprocess.run(
        [sys.executable, "-c", TELLING, " ".join(["chaos.injectors.inside", *faults.names()])],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) > 200


RANK = """
import os, sys
from pathlib import Path
from resilient.agent.bootstrap import WorkerSpec, run_rank
directory = Path(sys.argv[1])
(directory / "output").touch()
spec = WorkerSpec({}, directory / "output", directory / "stacks", directory / "record", directory / "config.yaml", "steps:go")
run_rank(spec)
"""

STEPS = """
import sys
from resilient import worker
def go(config):
    worker.init()
    for step in range(1, 4):
        with worker.phase("data"):
            pass
        with worker.phase("step"):
            pass
        worker.beat(step)
    print("chaos" if "chaos.injectors.inside" in sys.modules else "nothing")
"""


@pytest.mark.parametrize("allow", [False, True])
def test_a_rank_looks_for_orders_only_where_the_config_allows_it_whatever_the_environment_says(allow: bool, tmp_path: Path):
    config = load(config_of(tmp_path, allow=allow), [])
    (tmp_path / "steps.py").write_text(STEPS)
    for number, name in enumerate(faults.names()):
        if issubclass(faults.kind(name), Inside):
            inside.give(
                tmp_path, inside.Order(f"{number}", name, 7)
            )  # of a rank that is not there: what is looked for is who looks
    command = agent_command(config, layout(config, cpu_count=2, gpu_count=0), None, "secret", "127.0.0.1:1")
    assert command.environ[CHAOS_VARIABLE] == ("chaos.injectors.inside" if allow else "")
    environ = {**os.environ, CHAOS_VARIABLE: "chaos.injectors.inside", **command.environ}  # as the launcher puts them together
    environ |= {"PYTHONPATH": os.pathsep.join(map(str, [tmp_path, ROOT])), "RESILIENT_RUN_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", RANK, str(tmp_path)], capture_output=True, text=True, check=False, env=environ)
    assert done.returncode == 0, done.stderr + (tmp_path / "output").read_text()
    assert (tmp_path / "output").read_text().split() == ["chaos" if allow else "nothing"]
    assert not list((tmp_path / "chaos").glob("*.taken"))


@pytest.mark.parametrize("fault", faults.names())
def test_no_injector_does_anything_to_a_campaign_that_does_not_allow_it(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    path = config_of(tmp_path, allow=False)
    done: list[object] = []
    monkeypatch.setattr(injector, "_do", lambda *args: done.append(args))
    monkeypatch.setattr(injector.signal, "signal", lambda *args: None)
    request = InjectionRequest("x", fault, tmp_path, Target(rank=0, node=0))
    monkeypatch.setattr(sys, "stdin", io.StringIO(request.line()))
    assert injector.main() == 1
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [each["what"] for each in told] == ["failed"]
    assert f"{path}: chaos.allow: false" in told[0]["reason"]
    assert done == []
    assert not (tmp_path / "chaos").exists()
