"""A campaign that begins with the weights of a model from elsewhere."""

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from campaigns import Campaign, wait_for

from resilient.worker import load_config
from trainer.conversion.beginning import MODEL_FILE
from trainer.conversion.importing import import_checkpoint
from trainer.data import open_split
from trainer.sources import datasets

STEPS = 100_000  # more than there is time for: the test ends it


def test_a_campaign_begins_from_an_import_and_survives_a_kill(campaign: Callable[..., Campaign], tmp_path: Path):
    import transformers

    torch.manual_seed(1)
    sizes = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    described = transformers.LlamaConfig(**sizes, max_position_embeddings=32, initializer_range=0.2)
    source = transformers.AutoModelForCausalLM.from_config(described).eval()
    source.save_pretrained(tmp_path / "source")
    import_checkpoint(tmp_path / "source", tmp_path / "run")

    chance = random.Random(1)
    words = ["".join(chance.choices("abcdefghij", k=chance.randrange(2, 8))) for _ in range(200)]
    (tmp_path / "a.txt").write_text("\n<|endoftext|>\n".join(" ".join(chance.choices(words, k=400)) for _ in range(40)))
    config: dict[str, Any] = {
        "cluster": {"procs_per_node": 2, "device": "cpu", "threads_per_proc": 1},
        **yaml.safe_load((tmp_path / "run" / MODEL_FILE).read_text()),
        "data": {"text": [str(tmp_path / "a.txt")], "tokenizer": {"vocab_size": 300}},
        "train": {"steps": STEPS, "global_batch_size": 4, "micro_batch_size": 2, "precision": "fp32", "eval_interval": 0},
    }
    run = campaign(**config).start()
    run.reach(3)
    os.kill(run.workers()[1], signal.SIGKILL)
    wait_for(lambda: run.events("recovered"), run.logs)
    run.reach(run.step() + 1)
    run.signal(signal.SIGTERM)
    assert run.wait() == 75, run.output + run.logs()

    assert run.events("generation_started")[0]["resumed_step"] == 0
    assert len(run.events("recovered")) == 1
    losses = run.losses()
    assert sorted(losses) == list(range(1, max(losses) + 1))
    assert all(len(values) == 1 for values in losses.values())
    settled = load_config(run.run_dir / "config.yaml")
    data = open_split(datasets(settled), settled.data.split, "train", 32, settled.seed)
    window = torch.from_numpy(data.get(np.arange(4)))
    with torch.no_grad():
        expected = F.cross_entropy(source(window[:, :-1]).logits.flatten(0, 1), window[:, 1:].flatten())
    assert float(next(iter(losses[1]))) == pytest.approx(float(expected), abs=1e-4)
