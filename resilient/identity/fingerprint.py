"""A typed fingerprint of what determines the numbers of a campaign. Pure.

Owns its form, in which it lies in the run directory and in every checkpoint, and what the keys of a config come to: the value
of `auto` where the config alone settles it, and null for a key that is not in effect, so that the same training has the same
fingerprint.
"""

from collections.abc import Collection, Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from resilient.config import Config, Layout, spans
from resilient.identity.classes import CLASSES, SCRIPT_KEYS

VERSION = 1

Count = Annotated[int, Meta(ge=0, le=1 << 60)]
Hash = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


class Content(msgspec.Struct, frozen=True):
    """A file by what is in it: its size, and the hash of samples (see `checkpoint.sampled`)."""

    size_bytes: Count
    sampled_sha256: Hash


class Accepted(msgspec.Struct, frozen=True):
    """A change that would have been refused, and was accepted by `--accept`.

    Attributes:
        step: of the newest durable checkpoint then.
        t: unix seconds.
    """

    key: str
    old: Any
    new: Any
    step: Count | None
    t: float


class Lineage(msgspec.Struct, frozen=True):
    """Where a campaign branched off.

    Attributes:
        parent: its run directory.
        changes: keys that the fork was given otherwise: the parent's value and its own.
        t: unix seconds.
    """

    parent: str
    parent_name: str
    step: Count
    generation: Count
    changes: dict[str, tuple[Any, Any]]
    t: float


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """See the module.

    Attributes:
        keys: what each key that is told or refused comes to.
        given: of them those that the config says itself; the others are defaults.
        contents: of the files that a key names, in their order.
        prepared: files that the entry point's preparation made, by path in the run directory; None before it has.
        versions: of packages.
        lineage: None for a campaign that is nobody's fork.
    """

    version: Annotated[int, Meta(ge=1, le=VERSION)] = VERSION
    keys: dict[str, Any]
    given: list[str] = []
    contents: dict[str, list[Content]] = {}
    prepared: dict[str, Content] | None = None
    versions: dict[str, str] = {}
    accepted: list[Accepted] = []
    lineage: Lineage | None = None


_OPEN = ("parallel.dp", "parallel.dp_replicate")  # which the machines decide


def keys_of(config: Config, layout: Layout | None) -> dict[str, Any]:
    """What the keys that are told or refused come to, as JSON.

    Args:
        layout: on the machines that will run it; None where that is not known, or not the config's doing: then `parallel.dp: auto`
            is left out, and `parallel.dp_replicate: auto`.
    """
    values = config.model_dump(mode="json")
    names = SCRIPT_KEYS if config.is_script else tuple(key for key, kind in CLASSES.items() if kind != "free")
    found = {key: at(values, key) for key in names}
    if config.is_script:
        if layout is not None:
            found["parallel.dp"] = layout.world_size
        return found
    model, optimizer, data = config.model, config.optimizer, config.data
    warmup, decay = spans(config)
    falls = optimizer.schedule != "constant"
    found |= {
        "model.kv_heads": model.heads if model.kv_heads == "auto" else model.kv_heads,
        "model.ffn_hidden": model.ffn,
        "model.rope_theta": model.rope_theta if model.position == "rope" else None,
        "optimizer.beta1": optimizer.betas[0],
        "optimizer.beta2": optimizer.betas[1],
        "optimizer.beta3": optimizer.betas[2] if optimizer.name == "adan" else None,
        "optimizer.momentum": optimizer.momentum if optimizer.name == "muon" else None,
        "optimizer.warmup_samples": warmup,
        "optimizer.warmup_tokens": None,
        "optimizer.decay_samples": decay if falls else None,
        "optimizer.decay_tokens": None,
        "optimizer.min_lr": optimizer.min_lr if falls else None,
        "optimizer.wsd_fraction": optimizer.wsd_fraction if optimizer.schedule == "wsd" else None,
    }
    if data.text is None or data.tokenizer.vocab_file is not None:
        found["data.tokenizer.vocab_size"] = None  # none is trained
    if layout is not None:
        found |= {"parallel.dp": layout.dp, "parallel.dp_replicate": layout.dp_replicate}
        return found
    return {key: value for key, value in found.items() if key not in _OPEN or value != "auto"}


def at(values: Mapping[str, Any], key: str) -> Any:
    """The value of a dotted key in nested mappings; None where there is none."""
    found: Any = values
    for part in key.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def given_among(written: Mapping[str, Any]) -> list[str]:
    """The keys of the fingerprint that a config's file and command line say themselves."""

    def is_there(key: str) -> bool:
        *above, last = key.split(".")
        inside = at(written, ".".join(above)) if above else written
        return isinstance(inside, Mapping) and last in inside

    return [key for key, kind in CLASSES.items() if kind != "free" and is_there(key)]


def merged(recorded: Fingerprint | None, now: Fingerprint, changed: Collection[str]) -> Fingerprint:
    """What a campaign goes on as: what is known now, with what was known before where nothing is.

    Args:
        changed: keys that are not what they were.
    """
    if recorded is None:
        return now
    anew = any(key.startswith("data.") for key in changed)
    given = [key for key in now.given if key in changed or key in recorded.given]
    return msgspec.structs.replace(
        now,
        keys={**recorded.keys, **now.keys},
        given=given,
        contents={**recorded.contents, **now.contents},
        prepared=None if anew else recorded.prepared,
        versions=now.versions or recorded.versions,
        accepted=[*recorded.accepted, *now.accepted],
        lineage=recorded.lineage,
    )
