"""The hand: a process that does one fault to one target, beside the target, and undoes it.

`python -m chaos.hands.hand`, with an `Errand` as a line of JSON on standard input. It answers with lines of JSON: `armed`,
`injected`, `undone`, or `failed`. It ends, and undoes, when its standard input ends: whoever has sent it may be killed at any
moment. Killed itself, its guard undoes.
"""

import json
import os
import select
import signal
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from chaos import faults
from chaos.fault import CannotInject, Inside, Outside
from chaos.hands import inside
from chaos.hands.guard import Guard
from chaos.hands.moments import OF_THE_RUN, SLOW_POLL_S, Missed, Moment, wait_for
from chaos.hands.scene import Scene, Target
from resilient.config import load

WORD = b"now\n"


@dataclass(frozen=True)
class Errand:
    """What a hand is sent for. `limit_s`: for the moment to come. `on_word`: armed, it waits for a line before anything else."""

    id: str
    fault: str
    run_dir: Path
    target: Target
    params: dict[str, Any] = field(default_factory=dict)
    moment: Moment = field(default_factory=Moment)
    limit_s: float = 600.0
    lab: str = ""
    on_word: bool = False

    def line(self) -> str:
        """As it is sent."""
        return json.dumps(asdict(self), default=str) + "\n"

    @classmethod
    def of(cls, line: str) -> "Errand":
        """From what was sent. Raises ValueError."""
        try:
            return msgspec.convert(json.loads(line), cls, dec_hook=lambda kind, value: kind(value))
        except (RecursionError, TypeError) as error:
            raise ValueError(f"no errand: {error}") from None


def main() -> int:
    """Run one errand; 0 if the fault was injected and undone, 1 if not, with the reason told."""
    for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(sig, signal.SIG_IGN)  # its end is the end of its input
    errand = Errand.of(sys.stdin.readline())
    with Guard() as guard:
        path = errand.run_dir / "config.yaml"
        config = load(path, [])
        if not config.chaos.allow:
            _tell("failed", reason=f"{path}: chaos.allow: false: nothing is done to this campaign")
            return 1
        scene = Scene(errand.run_dir, config, errand.target, guard, errand.lab, _over)
        try:
            _do(errand, scene)
        except (CannotInject, Missed) as error:
            _tell("failed", reason=str(error))
            return 1
    _tell("undone")
    return 0


def _do(errand: Errand, scene: Scene) -> None:
    fault = faults.kind(errand.fault)(**errand.params)
    _tell("armed")
    if errand.on_word and not os.read(0, len(WORD)):
        raise Missed("nobody wants it any more")
    if isinstance(fault, Inside):
        _order(errand, scene)
        return
    assert isinstance(fault, Outside)
    deadline = time.monotonic() + errand.limit_s
    while True:
        wait_for(errand.moment, scene, deadline - time.monotonic())
        began_t = time.time()
        try:
            evidence = fault.inject(scene)
        except CannotInject:
            # While a run recovers there are moments at which there is nobody to hit.
            if errand.moment.phase != "recovery" or _over(SLOW_POLL_S):
                raise
            continue
        _tell("injected", t=began_t, evidence=dict(evidence))
        return


def _order(errand: Errand, scene: Scene) -> None:
    """Have the rank do it."""
    if errand.target.rank is None:
        raise CannotInject(f"{errand.fault} strikes a rank, and none is named")
    moment = errand.moment
    if moment.phase in OF_THE_RUN:  # which no rank can tell
        wait_for(moment, scene, errand.limit_s)
        moment = Moment()
    scene.guard.add(["rm", "-f", str(errand.run_dir / inside.DIRECTORY / f"{errand.id}.order")])
    inside.give(
        errand.run_dir,
        inside.Order(errand.id, errand.fault, errand.target.rank, moment.step, moment.phase, dict(errand.params)),
    )
    deadline = time.monotonic() + errand.limit_s
    while (mark := inside.taken(errand.run_dir, errand.id)) is None:
        if time.monotonic() > deadline or _over(0.02):
            if inside.withdraw(errand.run_dir, errand.id):
                raise Missed(f"rank {errand.target.rank} did not come to step {moment.step or 'any'}")
            deadline = float("inf")
    _tell("injected", t=mark["t"], evidence=mark)


def _over(seconds: float) -> bool:
    """Wait so long; whether the input has ended meanwhile."""
    ready, _, _ = select.select([0], [], [], seconds)
    return bool(ready) and not os.read(0, 1)


def _tell(what: str, **fields: object) -> None:
    try:
        sys.stdout.write(json.dumps({"what": what, "t": time.time(), **fields}, default=str) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        pass  # nobody asks any more; what was done is undone all the same


if __name__ == "__main__":
    sys.exit(main())
