"""Ranks that stand still behind a step until a test lets them go on: what it does to a run comes before the run's end."""

import time
from pathlib import Path

GO_ON = Path("go-on")  # in the directory of a campaign, where its ranks work


def hold(step: int, since: int | None) -> None:
    """Stand still behind step `since` and all later ones, in each generation, as long as the campaign may not go on."""
    while since is not None and step >= since and not GO_ON.exists():
        time.sleep(0.01)
