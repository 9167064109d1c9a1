"""Xids: what NVIDIA's driver writes to the kernel log of a GPU's errors, and what each of them asks for.

Pure. The numbers and what they ask for are those of NVIDIA's catalogue (docs.nvidia.com/deploy/xid-errors); what is not in the
table is told, and nothing follows from it.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Class = Literal["application", "reset", "replace", "note"]
"""application: the program's doing, or over with it; reset: the GPU computes nothing right before it is reset; replace: the node is
not to be used before somebody has looked at it; note: nothing follows from it by itself."""


@dataclass(frozen=True)
class Meaning:
    """One row of the table."""

    verdict: Class
    text: str


TABLE: dict[int, Meaning] = {
    13: Meaning("application", "a kernel raised an exception of the graphics engine, mostly by a wrong address"),
    31: Meaning("application", "a kernel reached outside its memory"),
    32: Meaning("application", "a damaged push buffer"),
    43: Meaning("application", "a kernel was stopped after an error of its own"),
    45: Meaning("application", "work was cleared away, as after another error or a killed process"),
    48: Meaning("reset", "a memory error that ECC could not correct"),
    61: Meaning("reset", "the GPU's microcontroller stopped at a breakpoint"),
    62: Meaning("reset", "the GPU's microcontroller has halted"),
    63: Meaning("note", "a row of memory or a page was marked, and is replaced at the next reset"),
    64: Meaning("replace", "a bad row of memory or a page could not be marked for replacement"),
    68: Meaning("application", "an exception of the video decoder"),
    69: Meaning("application", "a kernel raised an exception of the graphics engine"),
    74: Meaning("reset", "an error of an NVLink"),
    79: Meaning("replace", "the GPU has fallen off the bus"),
    92: Meaning("note", "many memory errors that ECC corrects"),
    94: Meaning("application", "a memory error that ECC could not correct, contained: only its program has lost data"),
    95: Meaning("reset", "a memory error that ECC could not correct, not contained"),
    109: Meaning("reset", "the GPU did not switch between programs in time"),
    110: Meaning("replace", "a security fault of the GPU"),
    119: Meaning("reset", "the GPU's system processor does not answer"),
    120: Meaning("reset", "the GPU's system processor has failed"),
    121: Meaning("note", "errors of the link between CPU and GPU were corrected"),
    123: Meaning("reset", "the GPU's power management failed"),
    136: Meaning("reset", "training of a link failed"),
    137: Meaning("application", "a program reached for another GPU's memory without the right to"),
    140: Meaning("reset", "a memory error that the GPU did not recover from"),
    143: Meaning("replace", "the GPU could not be initialised"),
    144: Meaning("reset", "an error of an NVLink (SAW)"),
    145: Meaning("reset", "an error of an NVLink (RLW)"),
    146: Meaning("reset", "an error of an NVLink (TLW)"),
    147: Meaning("reset", "an error of an NVLink (TREX)"),
    148: Meaning("reset", "an error of an NVLink (NVLPW_CTRL)"),
    149: Meaning("reset", "an error of an NVLink (NETIR)"),
    150: Meaning("reset", "an error of an NVLink (MSE)"),
    151: Meaning("replace", "keys of the GPU's links could not be rotated"),
    154: Meaning("note", "the driver says what the GPU needs"),
    155: Meaning("note", "an NVLink is down by a watchdog"),
    156: Meaning("note", "a resource was retired, and is replaced at the next reset"),
    158: Meaning("replace", "the GPU failed for good"),
}
_OF_MEMORY = frozenset({94})  # the program is all that was lost, but the GPU's memory is at fault
UNKNOWN = Meaning("note", "unknown to us")
# What Xid 154 says in words stands for what is to be done.
_ACTIONS: tuple[tuple[str, Class], ...] = (("Node Reboot Required", "replace"), ("GPU Reset Required", "reset"), ("Drain", "reset"))
_PLACE = re.compile(r"([0-9a-fA-F]{4,8}):([0-9a-fA-F]{2}):([0-9a-fA-F]{2})(?:\.[0-7])?")
_LINE = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)\): (\d+)(?:, pid='?(\d+|<unknown>)'?)?")


@dataclass(frozen=True)
class Xid:
    """One of them. Attributes: gpu: its place on the PCI bus; pid: of the process that it is about, where that is told."""

    gpu: str
    number: int
    pid: int | None
    line: str

    @property
    def verdict(self) -> Class:
        """What it asks for."""
        if self.number == 154:
            return next((verdict for words, verdict in _ACTIONS if words in self.line.rpartition(" to ")[2]), "note")
        return TABLE.get(self.number, UNKNOWN).verdict

    @property
    def over(self) -> bool:
        """Whether it ended with the program that it was about: the GPU, and what other processes hold on it, are as before."""
        return self.verdict == "application" and self.number not in _OF_MEMORY

    @property
    def unfit(self) -> bool:
        """Whether the GPU is not to be used as it is."""
        return self.verdict in ("reset", "replace")

    def __str__(self) -> str:
        asks = {"reset": "; reset the GPU", "replace": "; take the node out of service"}.get(self.verdict, "")
        return f"Xid {self.number}, {TABLE.get(self.number, UNKNOWN).text}{asks}: {self.line}"


def place(address: str) -> tuple[int, int, int] | None:
    """Domain, bus and device of an address on the PCI bus, with or without a function: the kernel and NVML write it differently."""
    found = _PLACE.fullmatch(address)
    return (int(found[1], 16), int(found[2], 16), int(found[3], 16)) if found is not None else None


def numbered(xid: Xid, gpus: Sequence[str]) -> int | None:
    """Which of these GPUs, addresses on the PCI bus, it is about; None if none of them."""
    at = place(xid.gpu)
    return next((number for number, address in enumerate(gpus) if at is not None and place(address) == at), None)


def parse(lines: Iterable[str]) -> Iterator[Xid]:
    """From lines of the kernel log, those that tell of one."""
    for line in lines:
        found = _LINE.search(line)
        if found is not None:
            pid = int(found[3]) if (found[3] or "").isdigit() else None
            yield Xid(found[1], int(found[2]), pid, line[found.start() :].strip())


def numbers(*verdicts: Class) -> list[int]:
    """The Xids of these classes."""
    return [number for number, meaning in TABLE.items() if meaning.verdict in verdicts]
