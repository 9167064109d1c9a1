"""Ranks of the trainer as real processes: each in the environment that torchrun would give it, with no supervisor.

They are forked from a server that has imported what they need, so that one costs milliseconds.
"""

import faulthandler
import math
import os
import random
import traceback
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import yaml
from forked import CONTEXT, forked

from resilient.worker import Config
from trainer.data import open_split
from trainer.data.indexed import IndexedWriter
from trainer.model import GPT
from trainer.schedule import for_config
from trainer.shape import shape_of
from trainer.weights import initialize

_PATIENCE_S = 300

# What FSDP calls, as torch has it from 2.12 on, and before.
GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
VOCABULARY = 61
STEPS = 8


def write_dataset(prefix: Path, *, vocabulary: int = VOCABULARY, documents: int = 40) -> Path:
    """Walks in which the next token is nearly always the same one, so that there is something to learn."""
    chance = random.Random(3)
    successor = list(range(vocabulary))
    chance.shuffle(successor)
    with IndexedWriter(prefix, np.dtype("<u2")) as writer:
        for _ in range(documents):
            token, document = chance.randrange(vocabulary), []
            for _ in range(300):
                document.append(token)
                token = successor[token] if chance.random() < 0.9 else chance.randrange(vocabulary)
            writer.add(document)
        words = ",".join(f'"{number}": {number}' for number in range(VOCABULARY))
        writer.commit({Path(f"{prefix}.tokenizer.json"): f'{{"model": {{"vocab": {{{words}}}}}}}'.encode()})
    return prefix


def write_config(directory: Path, dataset: Path, **sections: dict[str, object]) -> Path:
    """A config of a tiny model; the target does not change the schedule."""
    config: dict[str, Any] = {
        "run_dir": str(directory / "run"),
        "cluster": {"device": "cpu"},
        "model": {"layers": 2, "hidden": 32, "heads": 4, "seq_len": 16},
        "data": {"path": str(dataset), "split": [9, 1, 0]},
        "train": {
            **{"steps": STEPS, "global_batch_size": 12, "micro_batch_size": 2, "precision": "bf16"},
            **{"eval_interval": 0, "eval_iters": 1},
        },
        "optimizer": {"lr": 1e-2, "warmup_samples": 24, "decay_samples": 12 * 40},
        "checkpoint": {"every_steps": 100},
    }
    for name, values in sections.items():
        config[name] = {**config.get(name, {}), **values}
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def run_ranks(count: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """`function(*args)` on so many ranks; what each returned, or the exception it raised.

    A rank that is gone without a word was brought down from below (once in some hundred runs, by a heap that gloo or DTensor had
    corrupted). In a campaign the runtime would start all ranks anew; here they get one more chance, and the summary says so.
    """
    try:
        return _run_ranks(count, function, *args)
    except EOFError:
        warnings.warn("a rank was brought down by a signal; all ranks are started once more", stacklevel=2)
        return _run_ranks(count, function, *args)


def _run_ranks(count: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    from torch.distributed import TCPStore

    # Held by this process, so that no port can be taken by another between choosing and listening.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    children = []
    with ExitStack() as ends:
        for rank in range(count):
            ours, theirs = CONTEXT.Pipe()
            environ = {
                **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)},
                **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"},
                **{"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            }
            process = forked(_rank, theirs, environ, function, args)
            ends.callback(process.join)
            ends.callback(process.kill)
            theirs.close()
            children.append(ours)
        return [_received(child) for child in children]


def _received(pipe: Connection) -> Any:
    if not pipe.poll(_PATIENCE_S):
        raise TimeoutError("a rank says nothing")
    return pipe.recv()


def _rank(pipe: Connection, environ: dict[str, str], function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ.update(environ)
    faulthandler.enable()
    try:
        result = function(*args)
    except Exception as error:  # noqa: BLE001 - the parent decides what it means
        error.add_note(traceback.format_exc())
        result = error
    pipe.send(result)
    os._exit(0)


def train(config: Path, overrides: tuple[str, ...] = (), stop_at: int | None = None) -> list[dict[str, Any]]:
    """Train as this rank; what it reported, metrics and events. `stop_at`: the runtime asks to stop after so many steps."""
    from resilient import worker
    from trainer.main import train as entry

    told: list[dict[str, Any]] = []
    asked = 0

    def report(line: dict[str, Any], *, event: str | None = None) -> None:
        told.append({"event": event or "step", **line})

    def should_stop() -> str | None:
        nonlocal asked
        asked += 1
        return "SIGTERM" if stop_at is not None and asked > stop_at else None

    with mock.patch.object(worker, "report", report), mock.patch.object(worker, "should_stop", should_stop):
        entry(worker.load_config(config, list(overrides)))
    return told


def trained(config: Path, ranks: int, *overrides: str, stop_at: int | None = None) -> list[dict[str, Any]]:
    """What rank 0 reported; the others report nothing but what all do."""
    first, *others = run_ranks(ranks, train, config, overrides, stop_at)
    for told in (first, *others):
        if isinstance(told, Exception):
            raise told
    assert all(line["event"] not in {"step", "validation"} for told in others for line in told)
    return first  # type: ignore[no-any-return]


def steps(told: list[dict[str, Any]]) -> list[tuple[int, float, float, float]]:
    return [(line["step"], line["loss"], line["grad_norm"], line["lr"]) for line in told if line["event"] == "step"]


def textbook(config: Config) -> list[tuple[int, float, float, float]]:
    """The same training as a person would write it for one process: no mesh, no shards, no accumulation."""
    torch.set_num_threads(1)
    model = GPT(shape_of(config, VOCABULARY))
    initialize(model, config.seed)
    wanted = config.optimizer
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": matrices, "weight_decay": wanted.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=wanted.betas[:2], eps=wanted.eps, foreach=False)
    assert isinstance(config.data.path, Path)
    data = open_split([(config.data.path, 1.0)], config.data.split, "train", config.model.seq_len, config.seed)
    batch = config.train.global_batch_size
    found = []
    for step in range(1, config.train.steps + 1):
        window = torch.from_numpy(data.get(np.arange((step - 1) * batch, step * batch)))
        loss = F.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        norm = math.sqrt(sum(float((p.grad.double() ** 2).sum()) for p in model.parameters() if p.grad is not None))
        rate = for_config(config, step * batch)
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad *= min(1.0, wanted.clip_grad / norm)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        found.append((step, float(loss.detach()), norm, rate))
    return found
