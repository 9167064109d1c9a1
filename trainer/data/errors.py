"""What can be wrong with data: one type, whose message says what, in which file, and what to do."""


class DataError(Exception):
    """Data is missing, truncated, foreign, or does not fit what was asked for."""
