"""The documents: links lead somewhere, the README stays short, and the commands in it exist."""

import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import yaml

from resilient.config import Config, load

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text()
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_leads_to_a_file(document: Path):
    missing = [link for link in LINK.findall(document.read_text()) if not (document.parent / link).exists()]
    assert not missing


def test_every_document_is_linked_from_the_readme_or_from_another():
    linked = {(document.parent / link).resolve() for document in DOCUMENTS for link in LINK.findall(document.read_text())}
    assert {path.name for path in DOCUMENTS[1:] if path.resolve() not in linked} == set()


def test_the_readme_is_short_and_has_the_blocks_that_are_run_from_it():
    assert len(README.splitlines()) < 150
    for marker in ("quickstart", "tests", "figures"):
        assert len(re.findall(rf"<!-- {marker} -->\n.*?<!-- end -->", README, re.DOTALL)) == 1


def blocks() -> str:
    """All that a reader may copy into a shell, with lines that go on in the next one made whole."""
    return "\n".join(re.findall(r"```bash\n(.*?)```", README, re.DOTALL)).replace("\\\n", " ")


def commands() -> dict[str, set[str]]:
    """The subcommands of `resilient`, with the options that the README gives them."""
    found: dict[str, set[str]] = {}
    for call in re.findall(r"resilient ([a-z]+(?: [^\n&)]*)?)", blocks()):
        words = shlex.split(call, comments=True)
        name = " ".join(words[: 2 if words[0] in ("chaos", "lab", "ckpt", "data") else 1])
        found.setdefault(name, set()).update(word for word in words if word.startswith("--"))
    return found


def test_the_readme_has_commands():
    assert {"run", "status", "stop", "submit", "chaos run"} <= commands().keys()


@pytest.mark.parametrize(("command", "options"), commands().items(), ids=commands().keys())
def test_the_commands_of_the_readme_exist_with_their_options(command: str, options: set[str]):
    words = [sys.executable, "-m", "resilient", *command.split(), "--help"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {option for option in options if option not in re.sub("\x1b\\[[0-9;]*m", "", done.stdout)} == set()


def test_the_files_that_the_readme_runs_exist():
    named = re.findall(r"\b((?:examples|experiments)/[\w./-]+\.yaml)", blocks())
    assert named and all((ROOT / name).is_file() for name in named)


def configs() -> list[tuple[str, str]]:
    """The blocks of YAML in the documents that are a config or a part of one: document, text."""
    found = []
    for document in (*DOCUMENTS, ROOT / "CONTRIBUTING.md"):
        for block in re.findall(r"^ *```yaml\n(.*?)^ *```", document.read_text(), re.DOTALL | re.MULTILINE):
            text = textwrap.dedent(block)
            if yaml.safe_load(text).keys() <= Config.model_fields.keys():
                found.append((document.name, text))
    return found


@pytest.mark.parametrize(("document", "text"), configs(), ids=[f"{name}-{number}" for number, (name, _) in enumerate(configs())])
def test_every_config_of_the_documents_is_one_that_may_be_copied(
    document: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for variable in ("SCRATCH", "PROJECT", "TMPDIR", "USER"):
        monkeypatch.setenv(variable, str(tmp_path / "me"))
    path = tmp_path / "config.yaml"
    path.write_text(text)
    load(path)


def test_the_first_config_for_slurm_can_be_submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SCRATCH", str(tmp_path))
    monkeypatch.setenv("USER", "me")
    path = tmp_path / "config.yaml"
    path.write_text(next(text for name, text in configs() if name == "slurm.md"))
    words = [sys.executable, "-m", "resilient", "submit", "--dry-run", str(path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "#SBATCH --nodes=9" in done.stdout
