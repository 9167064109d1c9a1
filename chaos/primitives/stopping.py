"""Ends that are asked for: a signal, time to stop, and then no more time."""

import signal

import psutil
from pydantic import Field

from chaos.fault import Aim, CannotInject, Evidence, Expectation, Outside
from chaos.injectors.context import InjectionContext
from chaos.primitives.processes import end, is_gone
from resilient.exits import Exit

POLL_S = 0.02
KILLED = frozenset({-signal.SIGKILL, 128 + signal.SIGKILL})  # as a child's status, and as a shell or srun hands it on
ENOUGH_S = 20.0


class Stop(Outside):
    """Base of signals to the driver that ask it to stop."""

    aim = Aim.RUN

    grace_s: float = Field(60.0, gt=0, description="until the driver is killed (SIGKILL) if it has not ended")

    def expects(self) -> Expectation:
        killed = KILLED if self.grace_s < ENOUGH_S else frozenset()
        return Expectation(exits=frozenset({int(Exit.STOPPED)}) | killed, lost_steps=1 if killed else 0)

    def inject(self, context: InjectionContext) -> Evidence:
        driver = context.driver()
        self.ask(driver)
        left = self.grace_s
        while left > 0 and not is_gone(driver):
            if context.over(POLL_S):  # nobody may be left to start it again
                return {"pid": driver.pid, "state": "asked to end"}
            left -= POLL_S
        killed = not is_gone(driver)
        if killed:
            end(driver)
        return {"pid": driver.pid, "state": "killed" if killed else "ended"}

    def ask(self, driver: psutil.Process) -> None:
        """Send what is to be sent. Raises CannotInject."""
        raise NotImplementedError


def send(driver: psutil.Process, sig: signal.Signals) -> None:
    """Send a signal. Raises CannotInject where there is nobody any more."""
    try:
        driver.send_signal(sig)
    except psutil.NoSuchProcess:
        raise CannotInject(f"the driver (pid {driver.pid}) has ended by itself") from None
