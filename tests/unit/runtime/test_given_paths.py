"""Empty words for paths, as of a variable that is not set: commands refuse them, for they would mean the working directory."""

import inspect
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import pytest
import typer
from typer.testing import CliRunner

from checkpoint import given
from resilient.cli import app
from resilient.main import COMMANDS

WORDS = [
    ("fork", "", "new"),
    ("fork", "run", ""),
    ("ckpt", "prune", "", "--keep-last", "1", "--yes"),
    ("run", ""),
    ("run", "train.steps=3", ""),
    ("chaos", "run", ""),
    ("status", "run", "--svg", ""),
    ("watch", "run", ""),
]


def parameters() -> Iterator[tuple[str, Any]]:
    """Those of all commands that are paths, with what typer is told of them."""
    for each in [app, *(point.load() for point in entry_points(group=COMMANDS))]:
        for command in each.registered_commands:
            for name, parameter in inspect.signature(command.callback).parameters.items():
                kind = parameter.annotation
                if get_origin(kind) is Annotated and "Path" in str(get_args(kind)[0]):
                    yield f"{command.callback.__module__}.{command.callback.__name__} {name}", get_args(kind)[1]


def test_every_path_of_every_command_is_refused_where_it_is_empty():
    found = dict(parameters())
    assert len(found) > 40
    assert [name for name, told in found.items() if told.parser is not given.path] == []


@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_an_empty_word_is_wrong_use_and_nothing_is_done(words: tuple[str, ...], tmp_path: Path):
    (tmp_path / "events.jsonl").touch()
    (tmp_path / "checkpoints").mkdir()
    ended = subprocess.run([sys.executable, "-m", "resilient", *words], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 2 and "is a variable not set?" in ended.stderr
    assert sorted(each.name for each in tmp_path.iterdir()) == ["checkpoints", "events.jsonl"]


def test_a_list_of_paths_is_one_of_paths():
    wanted = typer.Typer()
    found: list[Path] = []

    @wanted.command()
    def command(paths: Annotated[list[Path], typer.Argument(parser=given.path)]) -> None:
        found.extend(paths)

    assert CliRunner().invoke(wanted, ["a", "b/c"], catch_exceptions=False).exit_code == 0
    assert found == [Path("a"), Path("b/c")]
