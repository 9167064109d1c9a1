"""A worker is killed."""

import signal

import psutil

from chaos.fault import Aim, CannotInject, Evidence, Expectation, Outside
from chaos.scene import Scene


class WorkerKill(Outside):
    """A worker is killed (SIGKILL), as by an operator, or by a kernel that is out of memory."""

    aim = Aim.RANK

    def expects(self) -> Expectation:
        return Expectation(frozenset({"exit"}), frozenset({"restart_workers"}), culprit=True)

    def inject(self, scene: Scene) -> Evidence:
        process = scene.worker()
        process.send_signal(signal.SIGKILL)
        try:
            process.wait(timeout=10)
        except psutil.TimeoutExpired:
            raise CannotInject(f"process {process.pid} of rank {scene.target.rank} is still there") from None
        return {"pid": process.pid, "state": "gone"}
