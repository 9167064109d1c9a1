"""How one job of a campaign has ended, for the command's last words."""

from typing import NamedTuple

from resilient.exits import Exit


class Ending(NamedTuple):
    """The exit code, and what a person should know of it.

    Attributes:
        written: the run directory has taken all that was for it. Where not, it may hang, and is not to be read.
    """

    code: Exit
    message: str
    written: bool = True
