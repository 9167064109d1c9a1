"""All benchmarks, one after the other; their figures as JSON in `results/`, and the pages that are made of them.

    python benchmarks/all.py                        # everything: hours
    python benchmarks/all.py recovery start         # these again; the others stay as they are
    python benchmarks/all.py --render               # only the pages
    python benchmarks/all.py --quick                # tries every script with the smallest counts, in a directory of its own

Writes `docs/benchmarks.md` whole, and the table between `<!-- figures -->` and `<!-- end -->` of README.md. A script that fails is
told of on the page, and the next one runs; exit status 1 if there was any. Nothing else should run on the machine meanwhile.
What `gpu.py` has found on a GPU, wherever that was, is shown as it is kept; nothing here runs it.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import figures
import pages

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results"
GPU = "gpu.json"  # of gpu.py --json, on a machine that has one, which is hardly ever this one: it is shown, and never renewed here

ENDING_S = 60.0  # for a script that is asked to end


@dataclass(frozen=True)
class Run:
    """A script with its arguments: all of it, and to try it out."""

    name: str
    script: str
    full: Sequence[str] = ()
    quick: Sequence[str] = ()
    peers: bool = False  # takes --ft-launcher


RUNS = (
    Run("start", "start.py", quick=("--rounds", "1")),
    Run("recovery", "recovery.py", ("--stops", "20"), ("--kills", "1", "--stops", "1", "--rounds", "1"), peers=True),
    Run("nodes", "nodes.py", quick=("--rounds", "1")),
    Run("lost_nodes", "lost_nodes.py", quick=("--part", "hour")),
    Run("control_plane", "control_plane.py", quick=("--ranks", "64", "--seconds", "3", "--deaths", "1")),
    Run("steady", "steady.py", quick=("--ranks", "2", "--seconds", "3", "--turns", "6", "--turn-s", "1")),
    Run("default_tier", "default_tier.py", quick=("--turns", "6", "--turn-s", "1", "--kills", "1")),
    Run("past", "past.py", quick=("--steps", "2000", "--faults", "20", "--jobs", "4", "--rounds", "1", "--watch-s", "4")),
    Run("checkpoint", "checkpoint.py", quick=("--mib", "48", "--rounds", "1", "--steps", "30")),
    Run("trainer", "trainer.py", quick=("--rounds", "1")),
    Run("many", "many.py", quick=("--agents", "2", "--kills", "1", "--watched-s", "2", "--rejoin-s", "10")),
    Run("leaks", "recovery.py", ("--leaks", "--kills", "200"), ("--leaks", "--kills", "6")),
    Run("your_script", "your_script.py", quick=("--kills", "1", "--rounds", "1", "--turns", "6", "--turn-s", "1")),
    Run("calm", "calm.py", quick=("--minutes", "0.5")),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [run.name for run in RUNS]
    parser.add_argument("name", nargs="*", help=f"of {', '.join(names)}; all without one")
    parser.add_argument("--quick", action="store_true", help="the smallest counts; the pages stay as they are")
    parser.add_argument("--render", action="store_true", help="run nothing")
    parser.add_argument("--ft-launcher", help="NVRx's, where it is not on the path")
    parser.add_argument("--limit-min", type=float, default=120.0, help="for one script")
    args = parser.parse_args()
    figures.end_by_exit()
    unknown = sorted({*args.name} - {*names})
    if unknown:
        parser.error(f"there is no {', '.join(unknown)}: choose from {', '.join(names)}")
    results, page = RESULTS, figures.ROOT / "docs/benchmarks.md"
    if args.quick:
        results = Path(tempfile.mkdtemp(prefix="benchmarks-"))
        page = results / "benchmarks.md"
    wrong = 0
    try:
        for run in () if args.render else [run for run in RUNS if not args.name or run.name in args.name]:
            wrong += not one(run, results, args)
    finally:
        render(results, page, None if args.quick else figures.ROOT / "README.md")
        say(f"written: {page}")
    return int(bool(wrong))


def one(run: Run, results: Path, args: argparse.Namespace) -> bool:
    """Run a script, and keep what it has found; whether all went well."""
    arguments = [*(run.quick if args.quick else run.full)]
    shown = ["python", f"benchmarks/{run.script}", *arguments]
    if run.peers and args.ft_launcher:
        arguments += ["--ft-launcher", args.ft_launcher]
    path = results / f"{run.name}.json"
    say(f"+ {' '.join(shown)}")
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as scratch:
        written, began = Path(scratch) / path.name, time.monotonic()
        command = [sys.executable, str(FOLDER / run.script), *arguments, "--json", str(written)]
        try:
            status, printed = ended(command, 60 * args.limit_min)
            problem = f"it ended with status {status}: {' '.join(printed.strip().splitlines()[-1:])}" if status else ""
        except subprocess.TimeoutExpired:
            problem = f"it took longer than {args.limit_min:g} min"
        found = figures.measured(run.name, "", (), arguments, {}, pathless(problem or "it has written no figures"))
        if written.is_file():
            found = figures.read(written)
            if problem and not found.error:
                found = figures.with_error(found, pathless(problem))
    figures.write(path, found)
    say(f"  {'failed: ' + found.error if found.error else 'done'} ({time.monotonic() - began:.0f} s)")
    return not found.error


def ended(command: Sequence[str], limit_s: float) -> tuple[int, str]:
    """Exit status of a script, and what it printed as errors.

    Raises:
        subprocess.TimeoutExpired: it took longer; it was asked to end, with what it has started, and has `ENDING_S` for that.
    """
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as script:
        try:
            errors = script.communicate(timeout=limit_s)[1]
        finally:  # Ctrl-C, too
            if script.poll() is None:
                script.terminate()
                try:
                    script.communicate(timeout=ENDING_S)
                except subprocess.TimeoutExpired:
                    script.kill()
        return script.returncode, errors


def pathless(text: str) -> str:
    """A message without the places of this machine."""
    return re.sub(r"(?:/[\w.+@-]+)+/([\w.+@-]+)", r"\1", text)


def render(results: Path, page: Path, readme: Path | None) -> None:
    """Write the pages of what there is."""
    found = []
    for run in RUNS:
        path = results / f"{run.name}.json"
        if path.is_file():
            found.append(figures.read(path))
    kept = results / GPU
    page.write_text(pages.page(found, figures.read(kept) if kept.is_file() else None))
    if readme is not None:
        readme.write_text(pages.put(readme.read_text(), pages.comparison(found)))


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
