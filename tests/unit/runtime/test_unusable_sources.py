"""What commands are to work with and is not there, or damaged: one message that names it, and the code of the documentation."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from soak import soaked

from resilient import ledger


def ended(*words: object, cwd: Path, output: Path | None = None) -> tuple[int, str]:
    """The exit code of a command and what it said on standard error."""
    with (output or cwd / "printed").open("w") as file:
        command = [sys.executable, "-m", "resilient", *map(str, words)]
        done = subprocess.run(command, cwd=cwd, stdout=file, stderr=subprocess.PIPE, text=True, check=False)
    return done.returncode, done.stderr


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    (path / "checkpoints" / "step-00000005").mkdir(parents=True)
    with ledger.Ledger(path) as lines:
        lines.event("run_started", {"name": "x", "target_step": 3}, generation=0, t=1.0)
    return path


@pytest.mark.parametrize("form", ["hf", soaked("megatron")])
def test_a_source_that_is_not_there_or_is_damaged_cannot_be_imported(tmp_path: Path, form: str):
    assert ended("ckpt", "import", "nope", "out", "--format", form, cwd=tmp_path) == (
        69,
        "resilient: nope is not there: SOURCE is what they have saved\n",
    )
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "config.json").write_text("{bad")
    (tmp_path / "source" / "latest_checkpointed_iteration.txt").write_text("7")
    code, said = ended("ckpt", "import", "source", "out", "--format", form, cwd=tmp_path)
    assert code == 69 and said.startswith("resilient: source") and said.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_what_was_asked_for_makes_no_sense_has_another_code(tmp_path: Path):
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "config.json").write_text(json.dumps({"model_type": "no such"}))
    assert ended("ckpt", "import", "source", "out", "--format", "none", cwd=tmp_path)[0] == 78


@pytest.mark.parametrize("words", [(), ("--json",), ("--verify",)])
def test_a_list_that_cannot_be_written_is_told_in_one_message(run_dir: Path, words: tuple[str, ...]):
    code, said = ended("ckpt", "ls", run_dir, *words, cwd=run_dir, output=Path("/dev/full"))
    assert (code, said) == (69, "resilient: No space left on device\n")


@pytest.mark.parametrize("content", [b"run_dir: [\n", bytes(range(128, 256)), b"- a\n", None])
def test_a_damaged_config_is_a_finding_of_security(run_dir: Path, content: bytes | None):
    config = run_dir / "config.yaml"
    config.mkdir() if content is None else config.write_bytes(content)
    code, said = ended("doctor", "--security", run_dir, "--json", cwd=run_dir)
    (found,) = (each for each in json.loads((run_dir / "printed").read_text())["findings"] if each["check"] == "config")
    assert (code, said, found["verdict"]) == (69, "", "fail") and f"{config} cannot be read" in found["text"]


@pytest.mark.parametrize("command", ["report", "watch", "status"])
def test_a_directory_in_place_of_a_file_is_named(run_dir: Path, command: str):
    (run_dir / ledger.METRICS).unlink(missing_ok=True)
    (run_dir / ledger.METRICS).mkdir()
    code, said = ended(command, run_dir, cwd=run_dir)
    assert code == 69 and f"{run_dir / ledger.METRICS}" in said + (run_dir / "printed").read_text()


def test_an_input_of_a_dataset_that_is_not_there_is_named(tmp_path: Path):
    assert ended("data", "build", "nope.txt", "--output", "x", cwd=tmp_path) == (78, "resilient: there is no file nope.txt\n")
