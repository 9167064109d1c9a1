"""A strike on its way: the injector that was sent for it, and what that has said."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from chaos.experiment import make
from chaos.fault import Expectation
from chaos.injectors.context import Target
from chaos.injectors.injector_process import InjectorProcess
from chaos.orchestration.campaign import by_signal
from chaos.planning import Strike
from chaos.verdict.record import Injection


@dataclass
class ActiveInjection:
    """Times in unix seconds.

    Attributes:
        asked_t: when its injector was sent.
        armed: its injector waits for the trigger.
        triggered: its injector was sent the trigger.
        t: when it was injected; None as long as it was not.
        failed: why it was not injected, or not undone.
        closed: its injector has ended.
        recorded: what became of it was written down, or it is tried again.
    """

    strike: Strike
    target: Target
    sent: InjectorProcess
    asked_t: float = field(default_factory=time.time)
    armed: bool = False
    triggered: bool = False
    t: float | None = None
    undone_t: float | None = None
    failed: str = ""
    closed: bool = False
    recorded: bool = False
    evidence: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.expects: Expectation = make(self.strike.fault, self.strike.params).expects()

    @property
    def last_t(self) -> float:
        """Since when nothing is done any more."""
        return max(self.t or 0.0, self.undone_t or 0.0)

    @property
    def may_be_anew(self) -> bool:
        """Whether chance may choose another moment for it, as it has not struck."""
        return bool(self.failed) and self.t is None and self.strike.by_chance

    def trigger(self) -> None:
        """Its injector may strike."""
        if not self.triggered:
            self.triggered = True
            if not self.closed:
                self.sent.trigger()

    def listen(self) -> list[str]:
        """What its injector has said since the last call, in words for people."""
        if self.closed:
            return []
        code = self.sent.ended()  # before its last words are read
        said = [text for answer in self.sent.answers() if (text := self._on_answer(answer))]
        if code is not None:
            self.closed = True
            self.sent.close()
            if self.t is None and not self.failed:
                self.failed = f"its injector ended with {by_signal(code)} (injectors.log)"
            if self.failed:
                said.append(f"not injected: {self.failed}" if self.t is None else self.failed)
        return said

    def injection(self) -> Injection:
        """What is recorded of it, once its injector has ended."""
        strike = self.strike
        times = self.asked_t, self.t, self.undone_t
        return Injection(strike.id, strike.fault, strike.params, self.target, *times, self.evidence, self.failed)

    def _on_answer(self, answer: Mapping[str, Any]) -> str:
        match answer["what"]:
            case "armed":
                self.armed = True
            case "injected":
                self.t, self.evidence = answer["t"], answer["evidence"]
                return _in_words(self.evidence)
            case "undone":
                self.undone_t = answer["t"]
            case "failed":
                self.failed = answer["reason"]
        return ""


def _in_words(evidence: Mapping[str, Any]) -> str:
    said = [f"{key} {value}" for key, value in evidence.items() if key != "t" and not isinstance(value, dict | list)]
    return ", ".join(said)[:120] or "injected"
