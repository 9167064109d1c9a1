"""The guard: undoes what a fault has changed, whatever becomes of the process that changed it.

A shell in a session of its own that waits for the end of a pipe: closed on purpose or by the death of its owner, it runs the
commands that undo, the last one first.
"""

import shlex
import subprocess
from collections.abc import Sequence
from types import TracebackType

from chaos.fault import CannotInject

Command = Sequence[str]


class Guard:
    """Commands that will be run. Each must work, or do no harm, also if what it undoes was never done."""

    def __init__(self) -> None:
        # Line by line, so that what the owner has said before it was killed counts.
        script = 'trap "" HUP INT TERM; all=; while IFS= read -r line; do all="$line; $all"; done; eval "$all"'
        self._shell = subprocess.Popen(
            ["sh", "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def add(self, command: Command) -> None:
        """Have it run at the end. Call it before the change is made.

        Raises:
            ValueError: it has more than one line, and would be cut.
        """
        if any("\n" in word for word in command):
            raise ValueError(f"a command of a guard is one line: {shlex.join(command)}")
        assert self._shell.stdin is not None
        self._shell.stdin.write(f"{shlex.join(command)}\n".encode())
        self._shell.stdin.flush()

    def run(self, command: Command) -> None:
        """Make a change that was added before, by a command.

        It holds the pipe as well: nothing is undone, although the owner has been killed, while the command may still do it.

        Raises:
            CannotInject: it did not work.
        """
        assert self._shell.stdin is not None
        held = [self._shell.stdin.fileno()]
        completed = subprocess.run(command, check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True, pass_fds=held)
        if completed.returncode:
            raise CannotInject(f"`{shlex.join(command)}` failed: {(completed.stderr or completed.stdout).strip()}")

    def release(self) -> None:
        """Undo now; returns when all commands have ended."""
        if self._shell.stdin is not None and not self._shell.stdin.closed:
            self._shell.stdin.close()
        self._shell.wait()

    def __enter__(self) -> "Guard":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()
