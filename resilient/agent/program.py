"""A script in a rank finds logging as under the interpreter, and ends as there: `os._exit`, by which ranks leave, does none of it.

After an exception functions of `atexit` are not called: they may take long, and a restart waits for the end of the rank.
"""

import atexit
import bz2
import gc
import gzip
import io
import logging
import lzma
import sys
import threading
import traceback
import zipfile
from contextlib import suppress

FILES_S = 5.0  # for what was not closed; a file may lie on a file system that does not answer

_OWN = "resilient"  # loggers whose lines are those of the runtime
_COMPRESSED = (gzip.GzipFile, bz2.BZ2File, lzma.LZMAFile, zipfile.ZipFile)
_BUFFERED = (io.BufferedWriter, io.BufferedRandom)


def leave_logging_to_the_script() -> None:
    """In a process that ranks come of: what the agent has set for itself is kept for the runtime's own loggers."""
    own, root = logging.getLogger(_OWN), logging.getLogger()
    own.setLevel(root.level)
    own.propagate = False
    for handler in list(root.handlers):
        own.addHandler(handler)
        root.removeHandler(handler)
    root.setLevel(logging.WARNING)


def end_threads_and_handlers() -> None:
    """A program may leave its last work to a thread, or to `atexit`."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()


def tell_of(error: BaseException) -> None:
    """By `sys.excepthook`, which the script may have replaced."""
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except BaseException:  # noqa: BLE001 - as the interpreter, which tells both
        sys.stderr.write("Error in sys.excepthook:\n")
        traceback.print_exc()
        sys.stderr.write("\nOriginal exception was:\n")
        traceback.print_exception(error)


def write_open_files() -> None:
    """Write what files hold that the script has not closed, and the ends of compressed ones; for `FILES_S` at most."""
    writer = threading.Thread(target=_write_open_files, name="open files", daemon=True)
    writer.start()
    writer.join(FILES_S)


def _write_open_files() -> None:
    """From the outermost file, which writes to the next one, to the innermost."""
    found = gc.get_objects()  # without those that were there before the fork
    for kinds, call in (((io.TextIOWrapper,), "flush"), (_COMPRESSED, "close"), (_BUFFERED, "flush")):
        for each in found:
            if issubclass(type(each), kinds):  # `isinstance` asks the object, which may be anything
                with suppress(Exception):
                    getattr(each, call)()
