"""What can be wrong with data: an error whose message says what, in which file, what was expected, and what to do."""


class DataError(Exception):
    """Data is missing, truncated, foreign, or does not fit what was asked for."""


class StorageError(DataError):
    """The place for the data is not good: no room, no permission, no locks, an error of reading."""


class MissingError(DataError):
    """A file is not there: its path is wrong or, where it was there before, its file system is away or somebody has deleted it."""


class WorkerEndedError(DataError):
    """A process that was at it has ended by itself or was killed, as where memory runs out."""
