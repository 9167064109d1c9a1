"""Calls of `resilient ckpt`, and checkpoints to call it with."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from click.testing import Result
from typer.testing import CliRunner

from checkpoint import LocalShard
from checkpoint.cli import app


def run(*arguments: object) -> Result:
    result = CliRunner().invoke(app, [str(each) for each in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def told(*arguments: object, code: int = 0) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def whole(name: str, data: torch.Tensor, unit: tuple[int, ...] | None = None) -> LocalShard:
    return LocalShard(name, tuple(data.shape), (0,) * data.dim(), data, unit or tuple(max(1, length) for length in data.shape))


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def part(root: Path, step: int, node: int, nodes: int) -> None:
    path = root / f"step-{step:08d}"
    path.mkdir(parents=True)
    described = {"step": step, "generation": 2, "node": node, "nodes": nodes, "size_bytes": 3 << 20, "files": 7}
    (path / "part.json").write_text(json.dumps(described))


def in_terminal(*arguments: object, answer: bytes = b"") -> tuple[int, str]:
    """Exit code and output of a command whose three streams are a terminal."""
    main, side = pty.openpty()
    script = "from checkpoint.cli import app; app()"
    command = [sys.executable, "-c", script, *map(str, arguments)]
    with subprocess.Popen(command, stdin=side, stdout=side, stderr=side, env={**os.environ, "TERM": "xterm"}) as process:
        os.close(side)
        os.write(main, answer)
        output = b""
        while True:
            try:
                output += os.read(main, 65536)
            except OSError:  # how Linux says that the other side has closed
                break
    os.close(main)
    return process.returncode, output.decode()
