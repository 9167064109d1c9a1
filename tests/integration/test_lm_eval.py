"""The recipe for EleutherAI's lm-eval in docs/trainer.md, with the released package in an environment of its own."""

import json
import math
import os
import shlex
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest
import torch

from resilient.worker import Config
from trainer.data import tokenizer as tokenizers
from trainer.export import export
from trainer.model import GPT
from trainer.shape import shape_of
from trainer.weights import initialize

RECIPE = (Path(__file__).parents[2] / "docs/trainer.md").read_text().partition("## lm-eval")[2]
PACKAGE = "lm_eval==0.4.13"
PROSE = "the cat sat on the mat and the dog sat on the log; süße Möwen fliegen über das Meer. " * 20
TEXTS = ["the cat sat on the log", "das Meer fliegen süße", "dog and cat " * 5]


def block(language: str) -> str:
    return RECIPE.partition(f"```{language}\n")[2].partition("```")[0]


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """The directory of programs of an environment that has lm-eval, and all that is here."""
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv/bin/python"
    place = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = subprocess.run([python, "-c", place], capture_output=True, text=True, check=True).stdout.strip()
    Path(packages, "here.pth").write_text(sysconfig.get_path("purelib") + "\n")
    installed = subprocess.run([python, "-m", "pip", "install", "-q", PACKAGE], capture_output=True, text=True, check=False)
    if installed.returncode:
        pytest.skip(f"NOT TESTED HERE: {PACKAGE} cannot be installed: {installed.stderr.strip().splitlines()[-1]}")
    return python.parent


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_lm_eval_finds_the_bits_a_byte_that_the_model_has(tmp_path: Path, programs: Path):
    coder = tokenizers.train([PROSE], 300)
    (tmp_path / "tokenizer.json").write_text(coder.to_str())
    config = Config.model_validate({"model": {"layers": 2, "hidden": 32, "heads": 4, "seq_len": 128, "init_std": 0.2}})
    model = GPT(shape_of(config, 300)).eval()
    initialize(model, 1)
    export(model, config, tmp_path / "exported", dtype=torch.float32, tokenizer=tmp_path / "tokenizer.json")
    (tmp_path / "prose.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks/prose.yaml").write_text(block("yaml"))
    (command,) = [line for line in block("bash").splitlines() if line.startswith("lm_eval ")]
    words = [programs / "lm_eval", *shlex.split(command)[1:], "--device", "cpu"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=tmp_path, env={**os.environ, **offline}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (results,) = tmp_path.glob("results/**/results_*.json")
    nats = 0.0
    for text in TEXTS:
        tokens = [coder.token_to_id("<|endoftext|>"), *coder.encode(text).ids]
        with torch.no_grad():
            chances = model(torch.tensor([tokens]))[0].log_softmax(-1)
        nats -= sum(chances[place, token].item() for place, token in enumerate(tokens[1:]))
    size_bytes = sum(len(text.encode()) for text in TEXTS)
    found = json.loads(results.read_text())["results"]["prose"]["bits_per_byte,none"]
    assert found == pytest.approx(nats / size_bytes / math.log(2), rel=1e-5)
