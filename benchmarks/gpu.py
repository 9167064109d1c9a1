"""Ten minutes of one GPU: tests, speed, copies, snapshots, restarts. Goes on where it was cut off.

    python benchmarks/gpu.py                        # on a machine with a GPU
    python benchmarks/gpu.py --dry-run              # the same on the CPU, small: whether all of it runs
    python benchmarks/gpu.py --case eager --case matmul

Missing packages are installed first (`pip install -e .[test]`); flash-attn is measured where it is installed. Each case runs in a
process of its own and leaves a line in DIR/gpu.jsonl when it is finished; one that was cut off, or failed, is run again by the next
start. At the end there are DIR/gpu.json and DIR/gpu.md, whose every figure says whether a GPU has seen it. Figures of a dry run are
of no worth but that.
"""

import argparse
import importlib.util
import json
import multiprocessing
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent
# Last, for benchmarks/trainer.py and benchmarks/checkpoint.py are not the packages of these names.
sys.path[:] = [str(ROOT), *(path for path in sys.path if path not in (str(HERE), str(ROOT))), str(HERE)]

LIMIT_S = 240.0  # for a case
NEEDED = ("torch", "numpy", "zarr", "crc32c", "msgspec", "pydantic", "yaml", "typer", "rich", "psutil", "tokenizers", "pytest")


@dataclass(frozen=True)
class Figure:
    """One number. Attributes: name: unique in its case; gpu: a GPU has seen it."""

    name: str
    unit: str
    value: float
    gpu: bool
    note: str = ""


@dataclass(frozen=True)
class Outcome:
    """What became of a case: figures, or why there are none; one that failed is tried again."""

    case: str
    figures: tuple[Figure, ...] = ()
    left_out: str = ""
    error: str = ""
    took_s: float = 0.0


class Journal:
    """The outcomes so far, in a file of JSON lines. A line that was cut off never was.

    Args:
        about: what all of it was measured on and with.

    Raises:
        ValueError: the file is of another machine, or of another kind of run.
    """

    def __init__(self, path: Path, about: Mapping[str, str]) -> None:
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
            self.outcomes[line["case"]] = Outcome(**{**line, "figures": tuple(Figure(**each) for each in line["figures"])})

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


def run_case(name: str, dry: bool, scratch: Path, known: Mapping[str, float], limit_s: float) -> Outcome:
    """A case in a process of its own, which has the GPU's memory to itself and takes its crash along."""
    context = multiprocessing.get_context("fork")  # torch is imported once, and CUDA begun in the child alone
    ours, its = context.Pipe()
    began = time.monotonic()
    process = context.Process(target=_in_child, args=(its, os.getpid(), name, dry, scratch, known))
    process.start()
    its.close()
    try:
        outcome = ours.recv() if ours.poll(limit_s) else Outcome(name, error=f"not finished within {limit_s:.0f} s")
    except EOFError:
        process.join()
        outcome = Outcome(name, error=f"its process ended with {process.exitcode}")
    process.kill()
    process.join()
    return Outcome(outcome.case, outcome.figures, outcome.left_out, outcome.error, round(time.monotonic() - began, 3))


def _in_child(pipe: Connection, parent: int, name: str, dry: bool, scratch: Path, known: Mapping[str, float]) -> None:
    from gpu_cases import CASES, LeftOut, Setting

    from resilient.lifeline import die_with_parent

    die_with_parent(parent)
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


def results(about: Mapping[str, str], outcomes: Iterable[Outcome]) -> dict[str, Any]:
    """What gpu.json holds."""
    import figures

    found = [{"case": each.case, **asdict(figure)} for each in outcomes for figure in each.figures]
    return {
        **about,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": figures.machine(),
        "figures": found,
        "left_out": {each.case: each.left_out for each in outcomes if each.left_out},
        "errors": {each.case: each.error for each in outcomes if each.error},
    }


def table(result: Mapping[str, Any]) -> str:
    """The same for a person."""
    lines = [
        f"# {result['mode']} on {result['device']}, commit {result['commit']}, {result['date']}",
        "",
        "| case | what | value | seen by a GPU | note |",
        "|---|---|---|---|---|",
    ]
    for each in result["figures"]:
        seen = "yes" if each["gpu"] else "no"
        lines.append(f"| {each['case']} | {each['name']} | {each['value']:,.4g} {each['unit']} | {seen} | {each['note']} |")
    lines += [f"| {case} | left out | | no | {why} |" for case, why in result["left_out"].items()]
    lines += [f"| {case} | FAILED | | no | {why.strip().splitlines()[-1]} |" for case, why in result["errors"].items()]
    return "\n".join(lines) + "\n"


def write(path: Path, text: str) -> None:
    """In one piece."""
    new = path.with_suffix(f"{path.suffix}.new")
    new.write_text(text)
    new.replace(path)


def about_this(dry: bool) -> dict[str, str]:
    """What figures are comparable with."""
    import figures
    import torch

    device = "CPU" if dry else torch.cuda.get_device_name()
    versions = f"torch {torch.__version__}"
    return {"mode": "dry run" if dry else "measured", "device": device, "versions": versions, "commit": figures.commit()}


def _asked(function: str, dry: bool) -> Any:
    """What a process of its own says: this one must not begin CUDA."""
    code = f"import json, sys; sys.path[:] = {sys.path!r}; import gpu; print(json.dumps(gpu.{function}({dry})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"there is no GPU that torch can use ({done.stderr.strip().splitlines()[-1]}); try --dry-run")
    return json.loads(done.stdout)


def run(out: Path, *, dry: bool, chosen: Sequence[str], limit_s: float = LIMIT_S) -> int:
    """All cases that are not finished, then the two files; 1 if a case failed."""
    out.mkdir(parents=True, exist_ok=True)
    if dry:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    about = about_this(True) if dry else _asked("about_this", dry)
    from gpu_cases import CASES

    journal = Journal(out / "gpu.jsonl", about)
    scratch = out / "scratch"
    scratch.mkdir(exist_ok=True)
    for name in chosen or CASES:
        if journal.finished(name):
            print(f"{name}: there already", flush=True)
            continue
        known = {f"{each.case}/{figure.name}": figure.value for each in journal.outcomes.values() for figure in each.figures}
        outcome = run_case(name, dry, scratch, known, limit_s)
        journal.add(outcome)
        said = [f"{each.name} {each.value:,.4g} {each.unit}" for each in outcome.figures]
        print(f"{name}: {'; '.join(said) or outcome.left_out or outcome.error} ({outcome.took_s:.1f} s)", flush=True)
    result = results(about, [journal.outcomes[name] for name in CASES if name in journal.outcomes])
    write(out / "gpu.json", json.dumps(result, indent=1) + "\n")
    write(out / "gpu.md", table(result))
    print(f"{out / 'gpu.json'}, {out / 'gpu.md'}")
    return int(bool(result["errors"]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="small, on the CPU")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), metavar="DIR", help="the journal, gpu.json and gpu.md")
    parser.add_argument("--case", action="append", default=[], metavar="NAME", help="only these")
    args = parser.parse_args()
    install(args.dry_run)
    from gpu_cases import CASES

    unknown = [name for name in args.case if name not in CASES]
    if unknown:
        parser.error(f"no case {', '.join(unknown)}; there are {', '.join(CASES)}")
    try:
        return run(args.out.absolute(), dry=args.dry_run, chosen=args.case)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
