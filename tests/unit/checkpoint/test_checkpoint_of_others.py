"""What another user's campaign lets a member of its group see."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoint_state import local_shards
from stranger import needs_root, shared_place, stranger_for_a_while
from typer.testing import CliRunner

from checkpoint import save
from checkpoint.cli import app


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """A run directory that others may read, with a tier whose directories are its user's alone."""
    with shared_place() as place:
        made = place / "run"
        roots = [place / f"ram-{node}" for node in range(2)]
        for root in roots:
            save(root / "node", 20, local_shards(), {}, generation=1)
            root.chmod(0o700)
        save(made / "checkpoints", 10, local_shards(), {}, generation=1)
        tiers = [
            {"name": "ram", "durable": False, "roots": [str(root / "node") for root in roots]},
            {"name": "durable", "durable": True, "roots": [str(made / "checkpoints")]},
        ]
        (made / "storage.json").write_text(json.dumps({"run_dir": str(made), "tiers": tiers}))
        for path in (made, *made.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        yield made


@needs_root
@pytest.mark.parametrize("command", ["ls", "verify", "export", "diff"])
def test_directories_of_nodes_that_may_not_be_read_are_left_out_and_said_to_be(run_dir: Path, command: str) -> None:
    more = {"export": ("--format", "torch", "--out", f"{run_dir.parent}/out"), "diff": (str(run_dir),)}.get(command, ())
    with stranger_for_a_while():
        result = CliRunner().invoke(app, [command, str(run_dir), *more])
    assert result.exit_code == 0, result.output
    said = f"2 directories of nodes were left out, of tier ram: {run_dir.parent}/ram-0/node may not be read"
    assert result.stderr.splitlines()[0] == f"resilient: {said}"
    assert "20" not in result.stdout.split()
    itself = CliRunner().invoke(app, ["ls", str(run_dir)])
    assert (itself.exit_code, itself.stderr) == (0, "")


@needs_root
def test_a_durable_tier_that_may_not_be_read_is_an_error(run_dir: Path) -> None:
    (run_dir / "checkpoints").chmod(0o700)
    with stranger_for_a_while():
        result = CliRunner().invoke(app, ["ls", str(run_dir)])
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (69, f"resilient: {run_dir}/checkpoints: Permission denied")
