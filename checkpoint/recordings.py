"""CUDA graphs that another thread records: what a thread must have said to CUDA before it works beside them.

By default (`torch.cuda.graph`, mode "global") a call that may wait for the GPU, as one that allocates or page-locks memory, fails
in every thread while a graph is recorded (error 900), and takes the graph along.
"""

import ctypes
from contextlib import suppress

FORBIDDEN = 900  # cudaErrorStreamCaptureUnsupported: operation not permitted when stream is capturing
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_LIBRARY = "libcuda.so.1"


def work_beside() -> None:
    """Calls of this thread are no concern of recordings from now on. Where there is no such driver nothing is recorded."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(_LIBRARY).cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_RELAXED)))
