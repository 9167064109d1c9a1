"""Python's garbage collection at fixed steps.

By itself it runs when objects have piled up, on each rank at another time, and all others wait at the next collective. At the same
step of all ranks it costs its time once.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EVERY_STEPS = 50


@contextmanager
def collected_at_steps() -> Iterator[Callable[[int], None]]:
    """No collection but that of the function given, which is called after each step with its number.

    What is there at the start is never looked at again, so that a collection takes little time.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield _collect
    finally:
        gc.enable()


def _collect(step: int) -> None:
    if step % EVERY_STEPS == 0:
        gc.collect()
