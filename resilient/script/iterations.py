"""The usual iteration of a training loop: which optimizers step in it, and how often. Learned from what steps; pure.

An iteration is what the loop repeats. It begins with the optimizer that stepped first in the process, when all others that are
known have stepped since the last one began: discriminator five times and generator once are an iteration of six steps. Where
batches are read from a DataLoader, it begins with the first step after one was read, so that an optimizer that steps four times
for each batch has iterations of four steps. Once an iteration has been repeated for a dozen steps, the next one is expected to be
the same.

All ranks of a script have the same optimizers step in the same order, and read alike between steps, so all learn the same. Where
one reads for all, and there are several steps for a batch, they do not.
"""

from enum import Enum, auto

MOST = 10  # steps in one iteration by optimizers that have stepped in it before
MOST_OPTIMIZERS = 4096  # in one iteration: a script that makes a new optimizer for each step has no usual one
TRIES = 3  # after which a loop is taken for one that repeats nothing


class Standing(Enum):
    """Where the loop stands after a step: in the usual iteration, at its end, or nobody knows."""

    WITHIN = auto()
    COMPLETE = auto()
    UNKNOWN = auto()


class Iterations:
    """Of one process; optimizers are told apart by numbers.

    Invariants: `_now` has how often each optimizer has stepped in the present iteration, all of them known. `_left` has how often
    they are yet to step in it; None where it is none of the usual.
    """

    def __init__(self) -> None:
        self._known: set[int] = set()
        self._leader: int | None = None  # with which iterations begin
        self._now: dict[int, int] = {}
        self._steps = 0  # in the present iteration
        self._at_first: dict[int, int] = {}  # what has stepped since the process began, as long as that may be one iteration
        self._first_steps = 0  # of them; -1: it is over
        self._usual: dict[int, int] = {}
        self._repeated = 0  # steps of the iterations that were like the usual one, without a gap
        self._left: dict[int, int] | None = None
        self._steps_left = 0
        self._single: int | None = None  # the usual iteration is one step of this optimizer, and the last one was, too
        self._reads = 0  # batches, since the last step
        self._by_batches: bool | None = None  # iterations begin with a batch; None: nobody knows yet
        self._begun_by_batches = 0
        self._tries = 0

    def read(self) -> None:
        """A batch was read.

        Several of them before a step are micro batches of an iteration, or a validation, perhaps of one rank: that says nothing.
        """
        self._reads += 1

    @property
    def awaits_batch(self) -> bool:
        """Whether the present iteration ends with the next batch, as those before it did."""
        return bool(self._by_batches) and self._begun_by_batches > 1 and self._tries < TRIES

    def step(self, optimizer: int) -> Standing:
        """An optimizer has stepped."""
        reads, self._reads = self._reads, 0
        if optimizer == self._single and (reads or not self._by_batches):
            return Standing.COMPLETE
        self._single = None
        if self._tries >= TRIES:
            return Standing.UNKNOWN
        if reads == 1 and self._by_batches is None:
            self._by_batches = True
        now = self._now
        if self._leader is None or (
            optimizer == self._leader and (not now or (len(now) == len(self._known) and (reads or not self._by_batches)))
        ):
            self._begun_by_batches += reads > 0
            self._begin(optimizer)
        else:
            if optimizer not in self._known:
                self._meet(optimizer)
                now = self._now
            now[optimizer] = now.get(optimizer, 0) + 1
            self._steps += 1
            if self._steps - len(now) > MOST or len(now) > MOST_OPTIMIZERS:
                self._give_up()
        if self._first_steps >= 0:
            self._at_first[optimizer] = self._at_first.get(optimizer, 0) + 1
            self._first_steps += 1
        return self._standing(optimizer)

    def _begin(self, optimizer: int) -> None:
        before, steps = self._now, self._steps
        self._now, self._steps, self._left = {optimizer: 1}, 1, None
        if self._leader is None:
            self._leader, self._known = optimizer, {optimizer}
        if not before:
            return
        self._repeated = self._repeated + steps if before == self._usual else steps
        self._usual = before
        if self._repeated > max(MOST + 1, steps):
            self._left, self._steps_left, self._first_steps = dict(before), steps, -1

    def _meet(self, optimizer: int) -> None:
        """One that nobody knew. If it comes soon, what was before it is the beginning of the first iteration."""
        self._known.add(optimizer)
        if self._first_steps > self._steps and self._first_steps - len(self._at_first) <= MOST:
            self._now, self._steps = dict(self._at_first), self._first_steps
        self._left, self._repeated = None, 0

    def _standing(self, optimizer: int) -> Standing:
        left = self._left
        if left is None or not left.get(optimizer):
            self._left = None
            return Standing.UNKNOWN
        left[optimizer] -= 1
        self._steps_left -= 1
        if self._steps_left:
            return Standing.WITHIN
        if self._steps == 1:
            self._single = optimizer
        return Standing.COMPLETE

    def _give_up(self) -> None:
        """It does not end: an optimizer that has stepped before does not any more, or not in each, or batches are further apart."""
        if self._by_batches and len(self._now) == len(self._known):
            self._by_batches = False
        else:
            self._known = {each for each, times in self._now.items() if times > 1}
            if self._leader not in self._known:
                self._leader = next((each for each in self._now if each in self._known), None)
        self._tries += 1
        self._now, self._steps, self._left, self._usual, self._repeated, self._first_steps = {}, 0, None, {}, 0, -1
