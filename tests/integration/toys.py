"""Small entry points for tests of the runtime: real ranks and real collectives, a state of one number."""

import contextlib
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from holding import hold
from torch.distributed.device_mesh import init_device_mesh

from resilient import worker

PRELOAD = ()  # no optimizer is used: torch._dynamo would be imported for nothing, in each of hundreds of campaigns


def _load(path: Path) -> int:
    return json.loads(path.read_text())["step"] if path.exists() else 0


def _save(path: Path, step: int) -> None:
    new = path.with_suffix(".new")
    new.write_text(json.dumps({"step": step}))
    new.replace(path)


def prepare(config: worker.Config, progress: object) -> None:
    """args: prepare_s: how long it takes; prepare_until: a file that it waits for."""
    time.sleep(config.args.get("prepare_s", 0))
    until = config.args.get("prepare_until")
    while until is not None and not Path(until).exists():
        time.sleep(0.01)


def count(config: worker.Config) -> None:
    """Count to `train.steps`; every `checkpoint.every_steps` the count is saved.

    args: step_s: time of a step; raise_at / exit_at / kill_at: what rank `bad_rank` does at that step, in every generation;
    last_words: printed before it exits; hang_at: it hangs there, `hang` says how; turns: what else of this holds in each
    generation, from the first on, and nothing of it after the last; deaf: rank `bad_rank` never asks whether to stop; work: loops
    that each step computes; slow_every / slow_s: every so many steps one takes so long; load_s: waiting for samples in each step,
    on rank `bad_rank` three times that; device_s: that its GPU is said to have computed in each step, on rank `bad_rank` three
    times that; holds: from this step on ranks stand still until the campaign may go on, see `holding`.
    """
    ctx = worker.init()
    assert ctx.run_dir is not None
    turn = config.args.get("turns", [])[ctx.generation - 1 : ctx.generation]
    args = {"step_s": 0.02, "bad_rank": 1, **config.args, **(turn[0] if turn else {})}
    state = ctx.run_dir / "state.json"
    dist.init_process_group("gloo")
    start = step = _load(state)
    worker.report({"step": step, "tier": "durable"}, event="resumed")
    print(f"rank {ctx.rank} of generation {ctx.generation} starts after step {step}")
    bad = ctx.rank == args["bad_rank"]
    while step < config.train.steps:
        if not (bad and args.get("deaf")) and worker.should_stop() is not None:
            break
        if bad and args.get("hang_at") == step + 1:
            _hang(args["hang"])
        if args.get("device_s"):
            worker.computed(args["device_s"] * (3 if ctx.rank == args["bad_rank"] else 1))
        if args.get("load_s"):
            with worker.phase("data"):
                time.sleep(args["load_s"] * (3 if ctx.rank == args["bad_rank"] else 1))
        with worker.phase("step"):
            if bad and args.get("raise_at") == step + 1:
                raise ValueError(f"bad sample at step {step + 1}")
            if bad and args.get("exit_at") == step + 1:
                print(args.get("last_words", ""))
                os._exit(3)
            if bad and args.get("kill_at") == step + 1:
                os.kill(os.getpid(), signal.SIGKILL)
            for _ in range(args.get("work", 0)):
                pass
            value = torch.full((1,), float(ctx.rank + step))
            dist.all_reduce(value)
            time.sleep(args["slow_s"] if args.get("slow_every") and step % args["slow_every"] == 5 else args["step_s"])
        step += 1
        if ctx.rank == 0:
            worker.report({"step": step, "loss": 1.0 / step + value.item(), "step_s": args["step_s"]})
        worker.beat(step)
        if step % config.checkpoint.every_steps == 0:
            _save_together(ctx, state, step)
        hold(step, args.get("holds"))
    if step > start:
        _save_together(ctx, state, step)
    else:
        dist.barrier()  # who leaves while others still connect looks to them as if it had died
    dist.destroy_process_group()


def _hang(how: str) -> None:
    """Never return."""
    if how == "loader":
        with worker.phase("data"):
            wait_for_a_sample()
    with worker.phase("step"):
        while how == "spin":
            sum(range(1000))
        while how == "collective":  # the others are at another one
            dist.broadcast(torch.zeros(1), src=1 - dist.get_rank())


def wait_for_a_sample() -> None:
    time.sleep(600)


def _save_together(ctx: worker.Context, state: Path, step: int) -> None:
    with worker.phase("snapshot"):
        dist.barrier()
        if ctx.rank == 0:
            _save(state, step)
            worker.report({"step": step, "tier": "durable", "bytes": 12, "files": 1}, event="committed")
        dist.barrier()


def with_children(config: worker.Config) -> None:
    """Count, while a child process of each rank (as a data loader has them) sleeps."""
    import multiprocessing

    for _ in range(2):
        multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,)).start()
    count(config)


def tell(config: worker.Config) -> None:
    """Print what a rank finds, as JSON.

    environment: the variables `args.names`; threads: the CPUs that each thread may run on; policies: of memory; groups: how long
    process groups that are made without a timeout wait, in seconds; asked: how long the config says; watcher: the module of what is
    called at every phase and step; ahead: whether the node has imported what optimizers need.
    """
    ahead = "torch._dynamo" in sys.modules
    ctx = worker.init()
    dist.init_process_group("gloo")
    groups = [
        dist.group.WORLD,
        dist.new_group([0, 1]),
        init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp")).get_group("dp"),
    ]
    threads = [int(thread.name) for thread in Path("/proc/self/task").iterdir()]
    maps = Path("/proc/self/numa_maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    watcher = worker._watcher
    told = {
        "environment": {name: os.environ.get(name) for name in config.args["names"]},
        "threads": [sorted(os.sched_getaffinity(thread)) for thread in threads],
        "policies": sorted({line.split()[1] for line in lines if "stack" in line}),
        "groups": [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups],
        "asked": ctx.collective_timeout_s,
        "watcher": watcher and type(watcher).__module__,
        "ahead": ahead,
    }
    print(json.dumps(told))
    dist.destroy_process_group()


def eat(config: worker.Config) -> None:
    """Count, but rank 1 joins the cgroup of `args` first, and in step 10 of the first generation takes all the memory there is."""
    group = Path(config.args["cgroup"]) / "cgroup.procs"
    if int(os.environ["RANK"]) == 1 and os.environ[worker.GENERATION_VARIABLE] == "1":
        group.write_text(str(os.getpid()))
        worker.eaten = []  # type: ignore[attr-defined]
        beat = worker.beat

        def beat_and_eat(step: int) -> None:
            beat(step)
            while step == 9 and config.args["eat"]:
                worker.eaten.append(b"x" * (1 << 20))  # type: ignore[attr-defined]

        worker.beat = beat_and_eat
    count(config)


def linger(config: worker.Config) -> None:
    """Count, but the last rank kills itself behind step 9 of the first generation, and has written to the device of `args`."""
    last = int(os.environ["WORLD_SIZE"]) - 1
    if int(os.environ["RANK"]) == last and os.environ[worker.GENERATION_VARIABLE] == "1":
        device = os.open(config.args["device"], os.O_RDWR)  # before all sockets: it is closed after them
        beat = worker.beat

        def beat_and_end(step: int) -> None:
            beat(step)
            if step == 9:
                os.write(device, bytes(4096))
                os.kill(os.getpid(), signal.SIGKILL)

        worker.beat = beat_and_end
    count(config)


def no_such_module(config: worker.Config) -> None:
    """Fails before the first step."""
    import a_module_that_is_not_there  # noqa: F401


def fickle(config: worker.Config) -> None:
    """Count, and rank 1 raises something else each time: at each of the steps `fail_at` once, and at step `stuck_at` always."""
    ctx = worker.init()
    assert ctx.run_dir is not None
    mark = ctx.run_dir / "raised"
    raised = mark.read_text().split() if mark.exists() else []
    left = [step for step in config.args["fail_at"] if str(step) not in raised]
    at = left[0] if left else config.args["stuck_at"]
    try:
        count(config.model_copy(update={"args": {"raise_at": at}}))
    except ValueError as error:
        with mark.open("a") as file:
            file.write(f"{at}\n")
        raise type(f"Fickle{len(raised)}", (Exception,), {})(str(error)) from error


def own_checkpoints(config: worker.Config) -> None:
    """Count, with a file for each step; the numbers of step `bad` are off the mark whenever it is computed."""
    ctx = worker.init()
    assert ctx.run_dir is not None
    dist.init_process_group("gloo")
    found = sorted(int(path.suffix[1:]) for path in ctx.run_dir.glob("own.*"))
    dist.barrier()
    if ctx.go_back_to is not None:
        for step in [each for each in found if each > ctx.go_back_to]:
            found.remove(step)
            if ctx.rank == 0:
                (ctx.run_dir / f"own.{step}").unlink()
    dist.barrier()
    step = max(found, default=0)
    worker.report({"step": step, "tier": "durable"}, event="resumed")
    while step < config.train.steps and worker.should_stop() is None:
        if not ctx.skips(step + 1) and step + 1 == config.args["bad"]:
            raise worker.BadNumbersError("the loss is a hundred times what it was", kind="loss_spike")
        step += 1
        worker.beat(step)
        if ctx.rank == 0:
            worker.report({"step": step, "loss": 1.0 / step, "step_s": 0.01})
            (ctx.run_dir / f"own.{step}").touch()
        dist.barrier()
    dist.destroy_process_group()


def bereft(config: worker.Config) -> None:
    """Rank 1 hangs up in the third step and is killed a moment later; rank 0 has ended by then: `args.ends` says how.

    There is one of them for each generation, and nothing happens in those that come after.
    """
    ctx = worker.init()
    dist.init_process_group("gloo")
    ends = dict(enumerate(config.args["ends"], 1)).get(ctx.generation, "")
    for step in range(1, config.train.steps + 1):
        if ends and step == 3 and ctx.rank == 1:
            for each in psutil.Process().net_connections("tcp"):
                if each.status != psutil.CONN_ESTABLISHED:
                    continue
                with socket.socket(fileno=os.dup(each.fd)) as connection, contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        _meet(ends)
        worker.beat(step)
        if ctx.rank == 0:
            worker.report({"step": step})


def _meet(ends: str) -> None:
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        if ends == "wraps":
            raise ValueError("\n  [Stage 1] failed to run forward") from error
        if ends == "cleans up":
            Path("/no/such/file").unlink()
        sys.exit(3)
