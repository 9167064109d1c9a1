"""All that the driver and its disk process say to each other, over a pair of sockets.

    driver ─► disk process     DiskRequest: DiskSettings first
    disk process ─► driver     DiskNews

The disk process is the only one that touches files of the run directory while a job runs: what stalls in the kernel stalls there.
Items have consecutive numbers; a number that is `Written` is never said again. Times are unix seconds, durations seconds.
"""

from collections.abc import Mapping
from typing import Literal

import msgspec

from checkpoint.framing import Message, Plain

# -- driver to disk process -----------------------------------------------------------------------------------------------


class ScalarSettings(Plain, kw_only=True, frozen=True):
    """Attributes: queue_size: scalars that are kept before they are written; interval: only every so many steps."""

    queue_size: int
    interval: int


class DiskSettings(Message, frozen=True):
    """The first message.

    Attributes:
        token: of the run directory's lease; the descriptor of its lock is inherited.
        scalars: for TensorBoard; None: none are written.
    """

    run_dir: str
    token: str
    lock_fd: int
    scalars: ScalarSettings | None = None


class Item(msgspec.Struct, frozen=True, array_like=True):
    """What is to be in a file of the run directory.

    Attributes:
        number: consecutive.
        path: below the run directory.
        text: a line with its end, which is appended; or the whole file, which is replaced.
        whole: whether it is the whole file.
    """

    number: int
    path: str
    text: str
    whole: bool = False


class WriteItems(Message, frozen=True):
    """Write these, in this order; answered by `Written`."""

    items: tuple[Item, ...]


class RaiseDurableFence(Message, frozen=True):
    """Refuse checkpoints of generations before this one.

    Attributes:
        root: of the durable tier.
        mark: name of a file that is in it as long as it is mounted, and what it holds.
        patience_s: for a commit that is under way.
    """

    call: int
    root: str
    mark: tuple[str, str]
    generation: int
    patience_s: float


class QuarantineCheckpoints(Message, frozen=True):
    """Rename the checkpoints that are invalidated.

    Attributes:
        invalidated: pairs of generation and step; see `resilient.recovery.rollback.InvalidationRule`.
    """

    call: int
    root: str
    generation: int
    invalidated: tuple[tuple[int, int], ...]


class RememberBadNodes(Message, frozen=True):
    """The next jobs do without these hosts for a while, each for a reason."""

    call: int
    reasons: Mapping[str, str]
    now: float
    for_s: float


class SeeToSuccessor(Message, frozen=True):
    """A duty to the chain that the job belongs to; see `slurm.succession.Succession`.

    Attributes:
        name: of the chain's jobs.
        patience_s: of `ensure`.
    """

    call: int
    duty: Literal["ensure", "avoid_bad_nodes", "ended"]
    name: str
    job_id: str
    max_jobs: int = 0
    patience_s: float | None = None
    exit_code: int = 0


class Diagnose(Message, frozen=True):
    """Read the ledger, leave a diagnosis of the run's end, answer with its short form.

    Attributes:
        message: what is known of the end.
        traceback: of a defect.
    """

    call: int
    exit_code: int
    message: str
    traceback: str = ""


class PackLogs(Message, frozen=True):
    """Pack what is old of logs and incidents; at most one at a time. It may be killed at any moment, and nothing is lost."""

    call: int


class TakeInLeft(Message, frozen=True):
    """Append the records that agents have left in the run directory. Done at the start, and at the end once agents are gone."""

    call: int


class CloseFiles(Message, frozen=True):
    """Once all items are written: close the files, give the lease up, answer, and end."""

    call: int


Call = RaiseDurableFence | QuarantineCheckpoints | RememberBadNodes | SeeToSuccessor | Diagnose | PackLogs | TakeInLeft | CloseFiles
DiskRequest = DiskSettings | WriteItems | Call

# -- disk process to driver -----------------------------------------------------------------------------------------------


class Serving(Message, frozen=True):
    """The process has started; said first."""


class Written(Message, frozen=True):
    """All items up to this number are in the run directory."""

    number: int


class Renewed(Message, frozen=True):
    """The lease was renewed: the run directory answers."""


class WriteFailed(Message, frozen=True):
    """The run directory cannot be written; it is tried again. Sent once for each different reason."""

    detail: str


class WriteWorks(Message, frozen=True):
    """It can be written again."""


class TakenOver(Message, frozen=True):
    """Another driver has the lease; nothing more is written."""

    owner: str


class Answer(Message, frozen=True):
    """A call has come to its end.

    Attributes:
        error: why it failed.
        text: what it is answered with.
        renamed: checkpoints that were quarantined: step, and their name now.
    """

    call: int
    error: str | None = None
    text: str = ""
    renamed: tuple[tuple[int, str], ...] = ()


DiskNews = Serving | Written | Renewed | WriteFailed | WriteWorks | TakenOver | Answer
