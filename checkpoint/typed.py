"""Types that msgspec decodes to, built one at a time.

msgspec looks at a structure when it is first asked to decode one, and publishes what it found before that is complete. A second
thread that decodes the same structure meanwhile reads memory which is not filled in yet: the process ends by SIGSEGV. Seen in
msgspec 0.22, in a snapshot daemon whose first copy and first flush began together.
"""

import os
import threading
from typing import TypeVar

import msgspec

K = TypeVar("K")

_building = threading.RLock()
_built: set[object] = set()
# A child that is forked while another thread builds would keep what is incomplete.
os.register_at_fork(before=_building.acquire, after_in_parent=_building.release, after_in_child=_building.release)


def built(kind: K) -> K:
    """`kind` itself, for msgspec's `convert`, `decode` and decoders: complete, whichever threads ask for it at once."""
    if kind not in _built:
        with _building:
            msgspec.json.Decoder(kind)
            _built.add(kind)
    return kind
