"""Nine minutes of one GPU: speed, copies, snapshots, restarts, chaos, tests. Goes on where it was cut off.

    python benchmarks/gpu.py                        # on a machine with a GPU
    python benchmarks/gpu.py --dry-run              # the same on the CPU, small: whether all of it runs
    python benchmarks/gpu.py --case eager --case matmul
    python benchmarks/gpu.py --render DIR/gpu.json --json benchmarks/results/gpu.json    # anywhere; then all.py --render

Missing packages are installed first (`pip install -e .[test]`); flash-attn is measured where it is installed. Each case runs in
a process of its own and leaves a line in DIR/gpu.jsonl when it is finished; one that was cut off, or failed, or for which no
time was left is run by the next start. Cases that measure no speed run beside each other, where there are cores. At the end
there are DIR/gpu.json and DIR/gpu.md, whose every figure says whether a GPU has seen it. Figures of a dry run are of no worth
but that, and no page is made of them.
"""

import argparse
import importlib.util
import json
import math
import multiprocessing
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent
# Last, for benchmarks/trainer.py and benchmarks/checkpoint.py are not the packages of these names.
sys.path[:] = [str(ROOT), *(path for path in sys.path if path not in (str(HERE), str(ROOT))), str(HERE)]

from gpu_report import DRY, MEASURED, Figure, Outcome, for_the_page, results, table

MINUTES = 8.75  # for all of it; what a case that is ended needs to give back is not in it
LIMIT_S = 100.0  # for a case, where LIMITS_S of the cases says nothing else
DRY_LIMIT_S = 400.0  # on two cores
LEAST_S = 12.0  # that must be left for a case to begin
LEAVE_S = 8.0  # for a case that is ended to end what it has started
CORES = 2  # of a case that runs beside others
NEEDED = ("torch", "numpy", "zarr", "crc32c", "msgspec", "pydantic", "yaml", "typer", "rich", "psutil", "tokenizers", "pytest")


class Journal:
    """The outcomes so far, in a file of JSON lines. A line that was cut off never was.

    Args:
        about: what all of it was measured on and with.

    Raises:
        ValueError: the file is of another machine, or of another kind of run.
    """

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self._path = path
        self.outcomes: dict[str, Outcome] = {}
        data = path.read_bytes() if path.exists() else b""
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            os.truncate(path, len(whole))
        lines = [json.loads(line) for line in whole.splitlines()]
        if not lines:
            self._append(dict(about))
        elif lines[0] != dict(about):
            raise ValueError(f"{path} is of {lines[0]}, and this is {dict(about)}: name another directory by --out")
        for line in lines[1:]:
            found = tuple(Figure(**{**each, "measured": tuple(each["measured"])}) for each in line["figures"])
            self.outcomes[line["case"]] = Outcome(**{**line, "figures": found})

    def add(self, outcome: Outcome) -> None:
        """Durable when this returns."""
        self._append(asdict(outcome))
        self.outcomes[outcome.case] = outcome

    def finished(self, case: str) -> bool:
        """Whether it need not run again."""
        return case in self.outcomes and not self.outcomes[case].error

    def _append(self, line: Mapping[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())


class Running:
    """A case in a process of its own, which has the GPU's memory to itself, or shares it, and takes its crash along.

    Args:
        known: figures of cases before.
        limit_s: after which it is ended.
    """

    def __init__(self, name: str, dry: bool, scratch: Path, known: Mapping[str, float], limit_s: float) -> None:
        context = multiprocessing.get_context("fork")  # torch is imported once, and CUDA begun in the child alone
        self.name, self._limit_s = name, limit_s
        self._began = time.monotonic()
        self.pipe, its = context.Pipe()
        self._process: ForkProcess = context.Process(target=_in_child, args=(its, os.getpid(), name, dry, scratch, known))
        self._process.start()
        its.close()

    @property
    def left_s(self) -> float:
        return max(0.0, self._began + self._limit_s - time.monotonic())

    def end(self) -> Outcome:
        """What it has found, or that it has not; its process and all below are gone then."""
        try:
            limit = f"not finished within {self._limit_s:.0f} s"
            outcome = self.pipe.recv() if self.pipe.poll() else Outcome(self.name, error=limit)
        except EOFError:
            self._process.join()
            outcome = Outcome(self.name, error=f"its process ended with {self._process.exitcode}")
        took_s = round(time.monotonic() - self._began, 3)
        self.kill()
        return replace(outcome, took_s=took_s)

    def kill(self) -> None:
        """End it, and what it has started: campaigns give back memory that they share, if they are asked."""
        import psutil

        below: list[psutil.Process] = []
        with suppress(psutil.NoSuchProcess):
            below = psutil.Process(self._process.pid).children(recursive=True)
        self._process.terminate()
        self._process.join(LEAVE_S)
        self._process.kill()
        self._process.join()
        self.pipe.close()
        for each in below:
            with suppress(psutil.NoSuchProcess):
                each.kill()


def run_cases(names: Sequence[str], start: Callable[[str], Running | None], at_once: int) -> Iterator[Outcome]:
    """Some cases beside each other, as they end. Args: start: begins one; None: no time is left for it."""
    waiting, running = [*names], list[Running]()
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                if (begun := start(waiting.pop(0))) is not None:
                    running.append(begun)
            if running:
                ready = wait([each.pipe for each in running], min(each.left_s for each in running))
                for each in [each for each in running if each.pipe in ready or not each.left_s]:
                    running.remove(each)
                    yield each.end()
    finally:
        for each in running:
            each.kill()


def _in_child(pipe: Connection, parent: int, name: str, dry: bool, scratch: Path, known: Mapping[str, float]) -> None:
    from gpu_cases import CASES, LeftOut, Setting

    from resilient.lifeline import die_with_parent

    die_with_parent(parent)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # through all that gives back what it has taken
    if dry:
        sys.modules["torch"].set_num_threads(1)
    try:
        outcome = Outcome(name, tuple(CASES[name](Setting(dry, scratch, known))))
    except LeftOut as reason:
        outcome = Outcome(name, left_out=str(reason))
    except Exception:  # noqa: BLE001 - what it was goes into the journal, and the next case runs
        outcome = Outcome(name, error=traceback.format_exc()[-2000:])
    pipe.send(outcome)


def install(dry: bool) -> None:
    """What is missing here. Raises SystemExit where it cannot be had."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing and (dry or subprocess.run([sys.executable, "-m", "pip", "install", "-e", f"{ROOT}[test]"], check=False).returncode):
        raise SystemExit(f"missing: {', '.join(missing)}; pip install -e '{ROOT}[test]'")


def write(path: Path, text: str) -> None:
    """In one piece."""
    new = path.with_suffix(f"{path.suffix}.new")
    new.write_text(text)
    new.replace(path)


def about_this(dry: bool) -> dict[str, Any]:
    """What figures are comparable with."""
    import figures
    import torch

    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    if dry:
        return {"mode": DRY, "device": "CPU", "versions": versions, "commit": figures.commit()}
    number = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
    versions["CUDA"] = str(torch.version.cuda)
    versions["cuDNN"] = f"{int(number[:-4])}.{int(number[-4:-2])}.{int(number[-2:])}" if len(number) > 4 else number
    versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30.0).stdout
        versions["driver"] = (said.strip().splitlines() or ["unknown"])[0]
    return {"mode": MEASURED, "device": torch.cuda.get_device_name(), "versions": versions, "commit": figures.commit()}


def _asked(function: str, dry: bool) -> Any:
    """What a process of its own says: this one must not begin CUDA."""
    code = f"import json, sys; sys.path[:] = {sys.path!r}; import gpu; print(json.dumps(gpu.{function}({dry})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"there is no GPU that torch can use ({done.stderr.strip().splitlines()[-1]}); try --dry-run")
    return json.loads(done.stdout)


def _import_ahead() -> None:
    """What cases need, once for all; none of it begins CUDA or starts a thread, as the runtime's fork server asks for."""
    from trainer.main import PRELOAD

    for name in PRELOAD:
        importlib.import_module(name)


def run(out: Path, *, dry: bool, chosen: Sequence[str], limit_s: float | None = None, minutes: float = math.inf) -> int:
    """All cases that are not finished, then the two files; 1 if a case failed or was not reached.

    Args:
        limit_s: for each case; None: as is usual.
        minutes: for all of it.
    """
    over_t = time.monotonic() + 60 * minutes
    out.mkdir(parents=True, exist_ok=True)
    if dry:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    about = about_this(True) if dry else _asked("about_this", dry)
    scratch = out / "scratch"
    scratch.mkdir(exist_ok=True)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(scratch / "inductor")  # also of campaigns, each with a TMPDIR of its own
    from gpu_cases import BESIDE, CASES, LIMITS_S

    _import_ahead()
    journal = Journal(out / "gpu.jsonl", about)
    not_reached: list[str] = []

    def start(name: str) -> Running | None:
        left_s = over_t - time.monotonic()
        if left_s < LEAST_S:
            not_reached.append(name)
            print(f"{name}: no time is left", flush=True)
            return None
        known = {f"{each.case}/{figure.name}": figure.value for each in journal.outcomes.values() for figure in each.figures}
        limit = limit_s or (DRY_LIMIT_S if dry else LIMITS_S.get(name, LIMIT_S))
        return Running(name, dry, scratch, known, min(limit, left_s))

    for names in together(chosen or [*CASES], BESIDE):
        wanted = [name for name in names if not journal.finished(name)]
        for name in names:
            if name not in wanted:
                print(f"{name}: there already", flush=True)
        for outcome in run_cases(wanted, start, max(1, len(os.sched_getaffinity(0)) // CORES)):
            journal.add(outcome)
            said = [f"{each.name} {each.value:,.4g} {each.unit}".rstrip() for each in outcome.figures]
            print(f"{outcome.case}: {'; '.join(said) or outcome.left_out or outcome.error} ({outcome.took_s:.1f} s)", flush=True)
    result = results(about, [journal.outcomes[name] for name in CASES if name in journal.outcomes], not_reached)
    write(out / "gpu.json", json.dumps(result, indent=1) + "\n")
    write(out / "gpu.md", table(result))
    print(f"{out / 'gpu.json'}, {out / 'gpu.md'}")
    return int(bool(result["errors"] or not_reached))


def together(names: Sequence[str], beside: Sequence[frozenset[str]]) -> Iterator[list[str]]:
    """One after the other; but those of a set, where they follow each other, in one list."""
    group: list[str] = []
    for name in names:
        if group and not any({name, group[-1]} <= each for each in beside):
            yield group
            group = []
        group.append(name)
    yield group


def render(path: Path, target: Path, commit: str | None = None) -> None:
    """Make what `all.py` shows of a gpu.json. Raises ValueError where it is of a dry run.

    Args:
        commit: whose files were measured; None: as was found out there.
    """
    import figures

    found = json.loads(path.read_text())
    figures.write(target, for_the_page(found if commit is None else {**found, "commit": commit}))
    print(target)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="small, on the CPU")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), metavar="DIR", help="the journal, gpu.json and gpu.md")
    parser.add_argument("--case", action="append", default=[], metavar="NAME", help="only these")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="for all cases; of a dry run as many as it takes")
    parser.add_argument("--render", type=Path, metavar="FILE", help="measure nothing: this gpu.json is what --json is made of")
    parser.add_argument("--commit", help="with --render: whose files were copied there, if without their history")
    parser.add_argument("--json", type=Path, metavar="FILE", help="for benchmarks/all.py, as in benchmarks/results/gpu.json")
    args = parser.parse_args()
    if args.json is not None and args.dry_run:
        parser.error("--json: figures of a dry run are not kept")
    if args.render is not None and args.json is None:
        parser.error("--render: --json says where to")
    try:
        if args.render is not None:
            render(args.render, args.json, args.commit)
            return 0
        install(args.dry_run)
        from gpu_cases import CASES

        unknown = [name for name in args.case if name not in CASES]
        if unknown:
            parser.error(f"no case {', '.join(unknown)}; there are {', '.join(CASES)}")
        out = args.out.absolute()
        status = run(out, dry=args.dry_run, chosen=args.case, minutes=math.inf if args.dry_run else args.minutes)
        if args.json is not None:
            render(out / "gpu.json", args.json)
    except ValueError as error:
        parser.error(str(error))
    return status


if __name__ == "__main__":
    sys.exit(main())
