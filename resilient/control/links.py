"""The links of the group, as far as their nodes have reported: which are down, and which have come back a moment ago.

What it knows is what a stall is compared with before anything is restarted.
"""

from dataclasses import dataclass

from resilient.protocol.messages import LinkChange


@dataclass(frozen=True)
class Outage:
    """A stretch of time in which a link carried nothing.

    Attributes:
        down_s: how long it lasted, or has lasted so far; of a link that flapped between two samples, the most that it can have.
        back_t: when it was reported that the link is up again, unix seconds; None while it is down.
    """

    node: int
    interface: str | None
    down_s: float
    back_t: float | None

    def __str__(self) -> str:
        lasted = f"{self.down_s:.1f} s"
        state = f"has been down for {lasted}" if self.back_t is None else f"was down for {lasted} and is back"
        return f"link {self.interface} of node {self.node} {state}"


class Links:
    """The links of all nodes. A link that nobody has reported is up."""

    def __init__(self) -> None:
        self._down: dict[tuple[int, str | None], float] = {}  # since when, unix seconds
        self._back: dict[tuple[int, str | None], Outage] = {}  # the last outage of each

    def changed(self, node: int, change: LinkChange, now: float) -> None:
        """A change as an agent has reported it.

        Args:
            now: unix seconds, here. A node behind a link that was down reports it when the link is back, which is when it counts.
        """
        link = (node, change.interface)
        match change.state:
            case "down":
                self._down.setdefault(link, now)
            case "up" | "flapped":
                self._down.pop(link, None)
                self._back[link] = Outage(*link, down_s=change.down_s or 0.0, back_t=now)

    def forget(self, node: int) -> None:
        """The agent that reported this node's links has gone, and its successor reports only what changes from then on."""
        self._down = {link: since for link, since in self._down.items() if link[0] != node}

    def outages(self, now: float, *, within_s: float) -> list[Outage]:
        """The links that are down now, then those that came back at most `within_s` ago; the longest outage first."""
        down = [Outage(*link, down_s=max(0.0, now - since), back_t=None) for link, since in self._down.items()]
        back = [
            outage
            for link, outage in self._back.items()
            if link not in self._down and outage.back_t is not None and now - outage.back_t <= within_s
        ]
        return [*sorted(down, key=_length, reverse=True), *sorted(back, key=_length, reverse=True)]


def _length(outage: Outage) -> float:
    return outage.down_s
