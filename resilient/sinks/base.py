"""The interface of a sink, and what a sink is given."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from resilient.sinks.totals import Totals


@dataclass(frozen=True)
class Line:
    """A line of the run directory.

    Attributes:
        file: `events.jsonl` or `metrics.jsonl`.
        end_bytes: where it ends in the file, which is its identity, too: a line that is sent twice has the same.
    """

    file: str
    end_bytes: int
    entry: Mapping[str, Any]


@dataclass(frozen=True)
class Campaign:
    """What sinks are about.

    Attributes:
        identity: of this campaign among all, however often its run directory is moved or another one has its name.
        totals: what all lines so far come to; raises OSError where they cannot be read.
        alive: whether the driver is there and gets on.
    """

    name: str
    identity: str
    run_dir: Path
    totals: Callable[[], Totals]
    alive: Callable[[], bool]


class NotTaken(Exception):
    """The receiver takes no lines now: it is down, or does not let this sender in. They are sent again, for as long as it takes."""


class Refused(Exception):
    """The receiver will never take these lines. Each is sent by itself, and one that is refused then is passed over."""


class Sink:
    """Belongs to one thread. Every call may take as long as it likes; what it raises is logged, and the call is made again.

    Attributes:
        files: those of the run directory whose lines it takes.
        history: whether it wants what was written before the job in which it is used for the first time.
        pause_s: between two calls of `take`; lines wait in their files.
        most: lines at a time.
    """

    files: ClassVar[Sequence[str]] = ()
    history: ClassVar[bool] = True
    pause_s: float = 0.0
    most: int = 1000

    def wants(self, line: Line) -> bool:
        """Whether it takes a line; the others are passed over."""
        return True

    def take(self, lines: Sequence[Line]) -> None:
        """Take lines of one file, in their order there. One that raises has taken none of them, and gets them again.

        A line may come twice, if the process was killed between a call and the moment at which that was written down. NotTaken and
        OSError: not now. Refused: never. What else is raised again and again has the lines tried one by one: then those behind one
        that makes the sink raise come before it. It is tried again after each that is taken, and passed over after three.
        """

    def refresh(self) -> None:
        """Called every two seconds or so, also when there is nothing to take."""

    def close(self) -> None:
        """Called at the end, after the last line was taken."""


Factory = Callable[[Campaign, Mapping[str, Any]], Sink]
"""What an entry point names: makes the sink, from the settings in `logging.sinks`. May raise; it is called again then."""
