"""Mutation tests of the cores: a mistake is put into the source, and the state machine that plays against the core must find it.

A mutant is a small substitution in one module. It is applied in a process of its own, while the module is imported, so that no file
is changed; if the text to replace is not there exactly once, that is an error, and never a mutant that was not found. The process
plays the machine from a given seed, so that the result is the same each time.
"""

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 900.0  # of a child process, on a machine that is busy with something else
SEED = 1
STEPS = 60  # of one example
FALSIFIED = 3  # its exit code when the machine has found something


class TextNotThere(AssertionError):
    """The source has changed since the mutant was written: write it anew."""


@dataclass(frozen=True)
class Mutant:
    """One mistake.

    Attributes:
        name: what the programmer has got wrong.
        module: in which.
        old: the right text, which is there exactly once; new: what stands there instead.
        examples: within which the machine finds it.
    """

    name: str
    module: str
    old: str
    new: str
    examples: int = 60

    @property
    def path(self) -> Path:
        """The module's file; nothing is imported to find it."""
        return ROOT.joinpath(*self.module.split(".")).with_suffix(".py")

    def applied(self, source: str) -> str:
        """The source with the mistake. Raises TextNotThere."""
        if (count := source.count(self.old)) != 1:
            raise TextNotThere(f"{self.name}: {self.module} has {count} times instead of once: {self.old!r}")
        return source.replace(self.old, self.new)


@dataclass(frozen=True)
class Outcome:
    """Of playing a machine. Attributes: falsified: it has found something; said: what, or what it has printed."""

    falsified: bool
    said: str


def run(machine: type[RuleBasedStateMachine], examples: int, steps: int = STEPS, *, seed: int | None = None) -> None:
    """Play a machine so many times, each time so many steps. Raises what it finds.

    Args:
        seed: of all choices; what is found is not made smaller then. None: other choices each time.
    """
    phases = list(Phase) if seed is None else [Phase.generate]
    run_state_machine_as_test(
        machine if seed is None else hypothesis.seed(seed)(machine),
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            phases=phases,
            print_blob=False,
            suppress_health_check=list(HealthCheck),
        ),
    )


def outcome(machine: Path, name: str, examples: int, mutant: Mutant | None, *, seed: int = SEED) -> Outcome:
    """Play a machine in a process of its own.

    Args:
        machine: the file; name: of the class in it.

    Raises AssertionError where the process neither plays to its end nor finds anything.
    """
    request = {
        "machine": str(machine),
        "name": name,
        "examples": examples,
        "seed": seed,
        "mutant": None if mutant is None else asdict(mutant),
    }
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, __file__, json.dumps(request)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        env={**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": path},
    )
    said = (done.stdout + done.stderr).strip()
    assert done.returncode in (0, FALSIFIED), f"the machine was not played: {said}"
    return Outcome(done.returncode == FALSIFIED, said)


# -- in the child process ----------------------------------------------------------------------------------------------


class _Loader(SourceFileLoader):
    """Args: mutant: what is applied to the source."""

    def __init__(self, mutant: Mutant) -> None:
        super().__init__(mutant.module, str(mutant.path))
        self._mutant = mutant

    def get_code(self, fullname: str) -> Any:  # compiled code of the unchanged source is left alone
        source = self._mutant.applied(Path(self.path).read_text())
        return compile(source, self.path, "exec")


class _Finder(MetaPathFinder):
    """Finds the mutant's module, and no other. Attributes: found: it was imported."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant, self._loader, self.found = mutant, _Loader(mutant), False

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        if fullname != self._mutant.module:
            return None
        self.found = True
        return importlib.util.spec_from_file_location(fullname, self._loader.path, loader=self._loader)


def _play_here(machine: Path, name: str, examples: int, seed: int, mutant: dict[str, str] | None) -> int:
    finder = None
    if mutant is not None:
        finder = _Finder(Mutant(**mutant))
        sys.meta_path.insert(0, finder)
    sys.path.insert(0, str(machine.parent))
    module = importlib.import_module(machine.stem)
    assert finder is None or finder.found, f"{machine} does not import {mutant}"
    try:
        run(getattr(module, name), examples, seed=seed)
    except Exception as error:  # noqa: BLE001  a mistake may show as any exception of the core
        print(f"{type(error).__name__}: {error}")
        return FALSIFIED
    return 0


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    sys.exit(_play_here(Path(asked["machine"]), asked["name"], asked["examples"], asked["seed"], asked["mutant"]))
