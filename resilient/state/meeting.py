"""Whether all ranks come to a place to which each one comes by itself; a collective there would hang where one does not."""

from datetime import timedelta

from torch.distributed import distributed_c10d

_COME, _ALL = "come", "all"


def all_come(place: str, ranks: int, patience_s: float) -> bool:
    """Wait for all ranks, for so many seconds; each gets the same answer, also one that comes later.

    Args:
        place: a name that is used once.
    """
    if ranks == 1:
        return True
    store = distributed_c10d.PrefixStore(f"resilient/{place}", distributed_c10d._get_default_store())
    if store.add(_COME, 1) == ranks:
        store.compare_set(_ALL, "", "yes")
    try:
        store.wait([_ALL], timedelta(seconds=patience_s))
    except RuntimeError:  # nobody has said so yet
        store.compare_set(_ALL, "", "no")
    return store.get(_ALL) == b"yes"
