"""The injector: a process that does one fault to one target, beside the target, and undoes it.

`python -m chaos.injectors.injector` reads an `InjectionRequest` as a line of JSON from standard input. It answers with lines of
JSON: `armed`, `injected`, `undone`, or `failed`. When its standard input ends it undoes the fault and ends: its sender may be
killed at any moment. When it is killed itself, its guard undoes the fault.
"""

import json
import os
import secrets
import select
import signal
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import psutil

from chaos import faults
from chaos.fault import CannotInject, Inside, Outside
from chaos.injectors import inside
from chaos.injectors.context import InjectionContext, Target
from chaos.injectors.guard import Guard
from chaos.injectors.moments import OF_THE_RUN, SLOW_POLL_S, Missed, Moment, wait_for
from checkpoint.typed import built
from resilient.config import load

TRIGGER = b"now\n"
_GONE = (psutil.Error, OSError)  # what was looked at has ended, or is not there, by the time that something is done to it


@dataclass(frozen=True)
class InjectionRequest:
    """What an injector is to do.

    Attributes:
        limit_s: how long it waits for the moment.
        on_trigger: once armed, it waits for the line `TRIGGER` first.
    """

    id: str
    fault: str
    run_dir: Path
    target: Target
    params: dict[str, Any] = field(default_factory=dict)
    moment: Moment = field(default_factory=Moment)
    limit_s: float = 600.0
    lab: str = ""
    on_trigger: bool = False

    def line(self) -> str:
        """As it is sent."""
        return json.dumps(asdict(self), default=str) + "\n"

    @classmethod
    def of(cls, line: str) -> "InjectionRequest":
        """From what was sent. Raises ValueError."""
        try:
            return msgspec.convert(json.loads(line), built(cls), dec_hook=lambda kind, value: kind(value))
        except (RecursionError, TypeError) as error:
            raise ValueError(f"no request: {error}") from None


def main() -> int:
    """Run one request; 0 if the fault was injected and undone, 1 if not, and the reason is answered."""
    for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(sig, signal.SIG_IGN)  # its end is the end of its input
    request = InjectionRequest.of(sys.stdin.readline())
    with Guard() as guard:
        path = request.run_dir / "config.yaml"
        config = load(path, [])
        if not config.chaos.allow:
            _answer("failed", reason=f"{path}: chaos.allow: false: nothing is done to this campaign")
            return 1
        context = InjectionContext(request.run_dir, config, request.target, guard, request.lab, _over)
        failed = ""
        try:
            _do(request, context)
        except (CannotInject, Missed, *_GONE) as error:
            failed = str(error)
            _answer("failed", reason=failed)
    if left := context.not_undone():
        failed = "; ".join([*([failed] if failed else []), f"not undone: {left}"])
        _answer("failed", reason=failed)
    if failed:
        return 1
    _answer("undone")
    return 0


def _do(request: InjectionRequest, context: InjectionContext) -> None:
    fault = faults.kind(request.fault)(**request.params)
    _answer("armed")
    if request.on_trigger and not os.read(0, len(TRIGGER)):
        raise Missed("nobody wants it any more")
    if isinstance(fault, Inside):
        _order(request, context, fault)
        return
    assert isinstance(fault, Outside)
    deadline = time.monotonic() + request.limit_s
    while True:
        wait_for(request.moment, context, deadline - time.monotonic())
        began_t = time.time()
        try:
            evidence = fault.inject(context)
        except (CannotInject, *_GONE):
            # While a run recovers there are moments at which there is nobody to hit.
            if request.moment.phase != "recovery" or _over(SLOW_POLL_S):
                raise
            continue
        _answer("injected", t=began_t, evidence=dict(evidence))
        return


def _order(request: InjectionRequest, context: InjectionContext, fault: Inside) -> None:
    """Have the rank do it."""
    if request.target.rank is None:
        raise CannotInject(f"{request.fault} strikes a rank, and none is named")
    moment = request.moment
    if moment.phase in OF_THE_RUN:  # which no rank can tell
        wait_for(moment, context, request.limit_s)
        moment = Moment()
    order = f"{request.id}-{secrets.token_hex(4)}"  # a name that was never given, nor taken back, by another injector
    removal = fault.removal(order)
    if removal is not None:
        context.guard.add(removal)
    context.guard.add(["rm", "-f", str(request.run_dir / inside.DIRECTORY / f"{order}.order")])
    inside.give(
        request.run_dir, inside.Order(order, request.fault, request.target.rank, moment.step, moment.phase, dict(request.params))
    )
    renewed_t = time.monotonic()
    deadline = renewed_t + request.limit_s
    while (mark := inside.taken(request.run_dir, order)) is None:
        if time.monotonic() > renewed_t + inside.RENEW_S:
            inside.renew(request.run_dir, order)
            renewed_t = time.monotonic()
        if time.monotonic() > deadline or _over(0.02):
            withdrawn = inside.withdraw(request.run_dir, order)
            mark = inside.taken(request.run_dir, order)
            if withdrawn or mark is None:
                raise Missed(f"rank {request.target.rank} did not come to step {moment.step or 'any'}")
            break
    if "failed" in mark:
        raise CannotInject(mark["failed"])
    _answer("injected", t=mark["t"], evidence=mark)


def _over(seconds: float) -> bool:
    """Wait so long; whether the input has ended meanwhile."""
    ready, _, _ = select.select([0], [], [], seconds)
    return bool(ready) and not os.read(0, 1)


def _answer(what: str, **fields: object) -> None:
    try:
        sys.stdout.write(json.dumps({"what": what, "t": time.time(), **fields}, default=str) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        pass  # nobody asks any more; what was done is undone all the same


if __name__ == "__main__":
    sys.exit(main())
