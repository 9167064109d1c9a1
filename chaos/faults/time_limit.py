"""The time of a job is nearly over."""

import math
import os
import subprocess
from datetime import datetime

from pydantic import Field

from chaos.fault import Aim, CannotInject, Evidence, Expectation, Need, Outside
from chaos.injectors.context import InjectionContext
from chaos.primitives.processes import is_gone
from resilient.exits import Exit

MINUTE_S = 60.0
PATIENCE_S = 120.0  # after the limit: Slurm looks at limits now and then, and grants some time


class TimeLimit(Outside):
    """The time limit of the job in Slurm becomes so short that it ends soon; Slurm counts in minutes, so up to one later."""

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
        before = _asked(environ, "scontrol", "--oneliner", "show", "job", job)
        began = datetime.fromisoformat(before["StartTime"])
        elapsed_s = (datetime.now() - began).total_seconds()
        minutes = max(1, math.ceil((elapsed_s + self.in_s) / MINUTE_S))
        conf = [f"SLURM_CONF={environ['SLURM_CONF']}"] if "SLURM_CONF" in environ else []
        update = ["env", *conf, "scontrol", "update", f"JobId={job}"]
        context.guard.add([*update, f"TimeLimit={before['TimeLimit']}"])
        context.guard.run([*update, f"TimeLimit={minutes}"])
        now = _asked(environ, "scontrol", "--oneliner", "show", "job", job)
        if now["TimeLimit"] == before["TimeLimit"]:
            raise CannotInject(f"the time limit of job {job} is still {before['TimeLimit']}")
        context.hold(minutes * MINUTE_S - elapsed_s + PATIENCE_S, unless=lambda: is_gone(driver))
        return {
            "job": job,
            "before": before["TimeLimit"],
            "after": now["TimeLimit"],
            "state": "ended" if is_gone(driver) else "runs",
        }


def _asked(environ: dict[str, str], *words: str) -> dict[str, str]:
    """What Slurm says, as names and values."""
    completed = subprocess.run(
        words, check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True, env={**os.environ, **environ}
    )
    if completed.returncode:
        raise CannotInject(f"`{' '.join(words)}` failed: {completed.stderr.strip()}")
    return dict(word.split("=", 1) for word in completed.stdout.split() if "=" in word)
