"""Random number generators of a process: Python's, NumPy's, torch's, and those of its GPU."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def capture() -> dict[str, Any]:
    """The state of all of them; see `encoding`."""
    found: dict[str, Any] = {
        "python": _of_python(random.getstate()),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        # Of all that are visible: the rank's own need not be the current one. None of this begins anything on another GPU.
        found["cuda"] = torch.stack(torch.cuda.get_rng_state_all())
    return found


def restore(found: Mapping[str, Any]) -> None:
    """Set what `capture` gave. Raises KeyError, TypeError, ValueError for anything else."""
    random.setstate(_for_python(found["python"]))
    np.random.set_state(found["numpy"])
    torch.set_rng_state(found["torch"])
    if "cuda" in found and torch.cuda.is_available():
        states = found["cuda"]
        if states.dim() == 1:  # of a snapshot by a version that had the current one's alone
            torch.cuda.set_rng_state(states)
        elif len(states) == 1:
            torch.cuda.set_rng_state(states[0])
        else:
            for index, state in enumerate(states[: torch.cuda.device_count()]):
                torch.cuda.set_rng_state(state, index)


def generator_state(value: Any) -> Any:
    """The state of a generator of the script's own, torch's, NumPy's or Python's; None if it is none, or draws from the system."""
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, np.random.Generator):
        return dict(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return value.get_state(legacy=False)
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return _of_python(value.getstate())
    return None


def set_generator(value: Any, state: Any) -> None:
    """Set what `generator_state` gave."""
    if isinstance(value, torch.Generator):
        value.set_state(state)
    elif isinstance(value, np.random.Generator):
        value.bit_generator.state = state
    elif isinstance(value, np.random.RandomState):
        value.set_state(state)
    elif isinstance(value, random.Random):
        value.setstate(_for_python(state))


def _of_python(state: Any) -> list[Any]:
    """What `getstate` gave, with its numbers as an array."""
    version, numbers, gauss = state
    return [version, np.array(numbers, np.uint32), gauss]


def _for_python(found: Any) -> tuple[Any, ...]:
    """What `setstate` takes."""
    version, numbers, gauss = found
    return version, tuple(numbers.tolist()), gauss


def reseed(step: int) -> None:
    """Begin other random numbers than a script begins with, on ranks to which none belong; alike where ranks began alike."""
    torch.manual_seed((torch.initial_seed() + 1_000_003 * (step + 1)) % 2**63)
    random.seed(random.getrandbits(64) + step)
    np.random.seed((int(np.random.randint(2**31)) + step) % 2**32)
