"""Paths on a command line."""

from pathlib import Path

import typer


def path(word: str) -> Path:
    """A path that is given: an empty word is a variable that is not set, and would mean the directory where the command runs.

    Raises:
        typer.BadParameter: it is empty.
    """
    return Path(not_empty(word))


def not_empty(word: str) -> str:
    """A word that names a path, and may say more than that. Raises typer.BadParameter: it is empty."""
    if not word:
        raise typer.BadParameter("is empty; is a variable not set?")
    return word
