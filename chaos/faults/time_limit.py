"""The time of a job is nearly over."""

import math
import os
import subprocess
from collections.abc import Mapping
from datetime import datetime

import psutil
from pydantic import Field

from chaos.fault import Aim, CannotInject, Evidence, Expectation, Need, Outside
from chaos.injectors.context import InjectionContext
from chaos.primitives.processes import is_gone
from resilient.exits import Exit

MINUTE_S = 60.0
PATIENCE_S = 120.0  # after the limit: Slurm looks at limits now and then, and grants some time


class TimeLimit(Outside):
    """The time limit of the job in Slurm becomes so short that it ends soon; Slurm counts in minutes, so up to one later.

    Only where it may be set again: users may shorten the limits of their jobs, and Slurm's operators alone lengthen them.
    """

    aim = Aim.RUN
    needs = frozenset({Need.SLURM})
    undone = "the old limit is set again, if the job still runs"

    in_s: float = Field(90.0, ge=0, description="from now until the job's end")

    def expects(self) -> Expectation:
        kinds, actions = frozenset({"time_limit", "preempted"}), frozenset({"finish_drain"})
        return Expectation(kinds, actions, exits=frozenset({int(Exit.STOPPED)}), lost_steps=0)

    def inject(self, context: InjectionContext) -> Evidence:
        driver = context.driver()
        environ = {name: value for name, value in driver.environ().items() if name.startswith(("SLURM_", "PATH"))}
        job = environ.get("SLURM_JOB_ID")
        if job is None:
            raise CannotInject("the driver runs in no job of Slurm")
        before = _job(environ, job)
        began = datetime.fromisoformat(before["StartTime"])
        elapsed_s = (datetime.now() - began).total_seconds()
        minutes = max(1, math.ceil((elapsed_s + self.in_s) / MINUTE_S))
        conf = [f"SLURM_CONF={environ['SLURM_CONF']}"] if "SLURM_CONF" in environ else []
        update = ["env", *conf, "scontrol", "update", f"JobId={job}"]
        context.check_undone(lambda: _as_it_was(driver, environ, job, before["TimeLimit"]))
        context.guard.add([*update, f"TimeLimit={before['TimeLimit']}"])
        if os.geteuid() != 0:
            context.guard.run([*update, "TimeLimit=+1"])  # refused to whoever may not set the old one again
        context.guard.run([*update, f"TimeLimit={minutes}"])
        now = _job(environ, job)
        if now["TimeLimit"] == before["TimeLimit"]:
            raise CannotInject(f"the time limit of job {job} is still {before['TimeLimit']}")
        context.hold(minutes * MINUTE_S - elapsed_s + PATIENCE_S, unless=lambda: is_gone(driver))
        return {
            "job": job,
            "before": before["TimeLimit"],
            "after": now["TimeLimit"],
            "state": "ended" if is_gone(driver) else "runs",
        }


def _as_it_was(driver: psutil.Process, environ: Mapping[str, str], job: str, limit: str) -> None:
    """Raises CannotInject where a job that runs has another limit."""
    if is_gone(driver):
        return
    now = _job(environ, job)
    if now["JobState"] == "RUNNING" and now["TimeLimit"] != limit:
        raise CannotInject(f"the time limit of job {job} was {limit}, and is {now['TimeLimit']}")


def _job(environ: Mapping[str, str], job: str) -> dict[str, str]:
    """What Slurm says of a job, as names and values."""
    words = ["scontrol", "--oneliner", "show", "job", job]
    completed = subprocess.run(
        words, check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True, env={**os.environ, **environ}
    )
    if completed.returncode:
        raise CannotInject(f"`{' '.join(words)}` failed: {completed.stderr.strip()}")
    return dict(word.split("=", 1) for word in completed.stdout.split() if "=" in word)
