"""Work that several threads share.

Owns the threads. Knows nothing of what is done.
"""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def for_each(items: Iterable[T], worker: Callable[[], Callable[[T], None]], threads: int, name: str) -> None:
    """Do something with every item, in their order but for those that are in work at the same time.

    Args:
        items: taken one by one, by the thread that is free.
        worker: called once in every thread; what it returns is called with items, and has what that thread needs to itself.
        threads: how many; with one, this thread does it all, and with none (there are no items) nothing is done.
        name: of the threads.

    Raises the first exception of a worker; what was not begun then is left.
    """
    rest, lock, failed = iter(items), threading.Lock(), threading.Event()

    def loop() -> None:
        work = worker()
        while not failed.is_set():
            with lock:
                try:
                    item = next(rest)
                except StopIteration:
                    return
            work(item)

    def guarded() -> None:
        try:
            loop()
        except BaseException:
            failed.set()
            raise

    if threads <= 1:
        if threads:
            loop()
        return
    with ThreadPoolExecutor(threads, thread_name_prefix=name) as pool:
        work = [pool.submit(guarded) for _ in range(threads)]
    for each in work:
        each.result()
