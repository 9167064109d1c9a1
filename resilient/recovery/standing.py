"""Where ranks stand that all wait in collectives: in which one each of them does, and who is not where the others are. Pure.

Read from torch's flight recorder, whose format is that of NCCL and gloo alike. A rank that is still in a collective which others
have finished is behind; one that is in another collective than those it should be in has gone astray. With two ranks that wait for
each other only the past can say which of them: a training step is a sequence of collectives that comes again and again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

CONTEXT = 4  # collectives before one, at most, that are looked for in the past


@dataclass(frozen=True)
class Standing:
    """The first collective that a rank has begun and not finished.

    Attributes:
        group: the process group, in a way in which all its members name it.
        number: of the collective within its group, counted from the group's beginning; None where it has none (point to point).
        what: the operation, and the shapes that it is called with.
        usual: whether it has come after the same collectives before; None where those have never come before.
        held: the call in which torch holds the rank's main thread (`resilient.agent.held`): an asynchronous collective is waited
            for there, and nowhere in torch.distributed. None: it is not held, or nobody has looked.
    """

    group: str
    number: int | None
    what: str
    usual: bool | None
    held: str | None = None

    def __str__(self) -> str:
        number = f"number {self.number} " if self.number is not None else ""
        strange = ", which has never followed those before it" if self.usual is False else ""
        return f"{self.what} ({number}of group {self.group}{strange})"


def unfinished(record: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The entries of a record that are not finished, in the order in which they were begun."""
    return [each for each in record["entries"] if not each.get("retired") and each.get("state") != "completed"]


def group_of(entry: Mapping[str, Any]) -> str:
    """The name of an entry's process group, and what it is for where somebody has said so."""
    name, about = entry.get("process_group", ("?", ""))
    return f"{name} ({about})" if about not in ("", "undefined") else f"{name}"


def number_of(entry: Mapping[str, Any]) -> int | None:
    """The number of an entry within its group, of its own kind."""
    return entry.get("p2p_seq_id") if entry.get("is_p2p") else entry.get("collective_seq_id")


def what_of(entry: Mapping[str, Any]) -> str:
    """An entry's operation and shapes."""
    return f"{entry.get('profiling_name', '?')} {entry.get('input_sizes', '')}".rstrip()


def standing(record: Mapping[str, Any]) -> Standing | None:
    """Where the rank stands whose flight recorder says this; None if all that it has begun is finished."""
    pending = unfinished(record)
    if not pending:
        return None
    entry = pending[0]
    members = record.get("pg_config", {}).get(str(entry.get("process_group", ("",))[0]), {}).get("ranks", "")
    earlier = record["entries"][: record["entries"].index(entry)]
    past = [what_of(each) for each in earlier if group_of(each) == group_of(entry)]
    return Standing(
        group=f"{group_of(entry)} {members}".rstrip(),
        number=None if entry.get("is_p2p") else number_of(entry),
        what=what_of(entry),
        usual=_usual(past, what_of(entry)),
    )


def _usual(past: Sequence[str], what: str) -> bool | None:
    for length in range(min(CONTEXT, len(past)), 0, -1):
        followed = {past[end] for end in range(length, len(past)) if past[end - length : end] == past[-length:]}
        if followed:
            return what in followed
    return None


def astray(standings: Mapping[int, Standing]) -> list[int]:
    """Of ranks that all wait in collectives those that are not where the others are; empty where nobody can say."""
    by_group: dict[str, dict[int, Standing]] = {}
    for rank, each in standings.items():
        by_group.setdefault(each.group, {})[rank] = each
    behind: list[int] = []
    for members in by_group.values():
        numbers = {rank: each.number for rank, each in members.items() if each.number is not None}
        behind += [rank for rank, number in numbers.items() if number < max(numbers.values())]
    strange = [rank for rank, each in standings.items() if each.usual is False]
    lonely: list[int] = []
    for members in by_group.values():
        of = {what: [rank for rank, each in members.items() if each.what == what] for what in {e.what for e in members.values()}}
        most = max(map(len, of.values()))
        lonely += [rank for ranks in of.values() if len(ranks) < most for rank in ranks]
    return next((sorted(found) for found in (behind, strange, lonely) if 0 < len(found) < len(standings)), [])
