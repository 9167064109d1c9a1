"""What a config leaves to the machine that it runs on, decided: the one place that knows all of it."""

from collections.abc import Mapping
from typing import NamedTuple

from resilient import compiling, precision
from resilient.config import Config


class Decision(NamedTuple):
    """A value as YAML has it, and in a few words why it is this one."""

    value: str
    why: str


def decided(config: Config) -> tuple[Config, Mapping[str, Decision]]:
    """The config with nothing of it left open, and what was decided, by the key that left it open."""
    found: dict[str, Decision] = {}
    config, multiplied = precision.settled(config)
    if multiplied is not None:
        found["train.precision"] = Decision(multiplied.precision, multiplied.why)
    config, compiled = compiling.settled(config)
    if compiled is not None:
        found["train.compile"] = Decision(str(compiled.compile).lower(), compiled.why)
    return config, found
