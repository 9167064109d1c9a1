"""Why a command ends without its result.

Owns the one exception of the tools, and the exit codes. Imports nothing.
"""

UNUSABLE = 69
"""What is there cannot be used."""
WRONG = 78
"""What was asked for makes no sense."""


class Refusal(Exception):
    """One message for a person, and the exit code of the command."""

    def __init__(self, message: str, code: int = UNUSABLE) -> None:
        super().__init__(message)
        self.code = code
