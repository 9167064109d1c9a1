"""A toy whose module takes long to import, as from a file system that many nodes share."""

import time

from toys import count

time.sleep(8.0)

__all__ = ["count"]
