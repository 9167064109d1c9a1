"""`resilient watch`: one look at campaigns, or one after the other, what it says, and the command that it tells changes by."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from resilient import strict_json
from resilient.exits import EnvironmentUnusable
from resilient.watch.judgement import OVER, Judgement, Seen, worst
from resilient.watch.look import judged
from resilient.watch.memory import Memory

NOTIFY_S = 60.0  # that the command may take
WELL = ("progressing", "waits")  # as a first state nothing to be told of


@dataclass(frozen=True)
class Look:
    """One campaign. Attributes: run_dir: absolute; shown: as it was named; seen: None: it could not be."""

    run_dir: Path
    shown: Path
    seen: Seen | None
    found: Judgement

    def line(self) -> str:
        return f"{self.shown}: {self.found.state}: {self.found.text}"

    def as_json(self) -> dict[str, object]:
        seen = self.seen
        known = {} if seen is None else {"name": seen.name, "step": seen.step, "target_step": seen.target_step, "loss": seen.loss}
        last_t = seen.steps_t[-1] if seen is not None and seen.steps_t else None
        return {"run_dir": str(self.run_dir), "state": self.found.state, "code": self.found.code, "text": self.found.text,
                "last_step_t": last_t, **known}  # fmt: skip

    def environment(self, before: str) -> dict[str, str]:
        """What the command is told."""
        told = {"run_dir": self.run_dir, "name": "", "step": "", "target_step": "", **self.as_json(), "state_before": before}
        return {f"RESILIENT_{name.upper()}": "" if value is None else str(value) for name, value in told.items()}


@dataclass(frozen=True)
class Wanted:
    """What is asked for. Attributes: every_s: between two looks; None: one is enough."""

    run_dirs: Sequence[Path]
    patience_s: float | None
    notify: str | None
    memory: Path
    every_s: float | None
    as_json: bool


def watch(wanted: Wanted, say: Callable[[str], None]) -> int:
    """Look, say what is seen, and tell of changes; the exit code of the last look.

    With `every_s` it ends once all campaigns are over, or with Ctrl-C; one before the end of the first look is an interrupt.
    """
    code: int | None = None
    try:
        while True:
            looks = _looks(wanted.run_dirs, wanted.patience_s)
            code = worst([look.found for look in looks])
            as_lines = "\n".join(look.line() for look in looks)
            say(strict_json.dumps([look.as_json() for look in looks]) if wanted.as_json else as_lines)
            if wanted.notify is not None:
                _notify(looks, wanted.notify, wanted.memory)
            if wanted.every_s is None or all(look.found.state in OVER for look in looks):
                return code
            time.sleep(wanted.every_s)
    except KeyboardInterrupt:
        if code is None:
            raise
        return code


def _looks(run_dirs: Sequence[Path], patience_s: float | None) -> list[Look]:
    found = judged(run_dirs, time.time(), patience_s)
    return [Look(run_dir.absolute(), run_dir, *each) for run_dir, each in zip(run_dirs, found, strict=True)]


def _notify(looks: Sequence[Look], command: str, path: Path) -> None:
    """Run the command for each campaign whose state is another one; one that could not be told is told the next time."""
    memory = Memory(path)
    try:
        with memory.held():
            for look in looks:
                key, state = str(look.run_dir), look.found.state
                before = memory.states.get(key, "")
                if state == before:
                    continue
                if (not before and state in WELL) or _run(command, look.environment(before)):
                    memory.states[key] = state
    except OSError as error:
        raise EnvironmentUnusable(f"{path} cannot be used: {error.strerror}; --memory FILE names another one") from None


def _run(command: str, told: Mapping[str, str]) -> bool:
    """Whether the command has ended well."""
    try:
        done = subprocess.run(["/bin/sh", "-c", command], env={**os.environ, **told}, timeout=NOTIFY_S, check=False)
        why = f"ended with status {done.returncode}" if done.returncode else ""
    except subprocess.TimeoutExpired:
        why = f"took longer than {NOTIFY_S:g} s"
    except OSError as error:
        why = f"could not be run: {error.strerror}"
    if why:
        sys.stderr.write(f"resilient: the command of --notify {why}; it is run again at the next look\n")
    return not why
