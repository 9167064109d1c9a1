"""Logs of a run: where they are in the run directory, how they are packed, and how they are read again."""
