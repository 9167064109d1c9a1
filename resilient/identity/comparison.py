"""What differs between the fingerprint that a campaign has and the one that it would go on with. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from resilient.config.errors import shown_change
from resilient.identity.classes import CLASSES, FILES, Kind, kind_of
from resilient.identity.fingerprint import Content, Fingerprint


@dataclass(frozen=True)
class Change:
    """A key that is not what it was; both values are JSON, that of a file a text that says what is in it."""

    key: str
    old: Any
    new: Any
    kind: Kind

    def __str__(self) -> str:
        return f"{self.key}: {' → '.join(shown_change(self.old, self.new))}"


def compare(recorded: Fingerprint, now: Fingerprint, defaults: Mapping[str, Any] | None = None) -> list[Change]:
    """What has changed, in the order of the table of classes; what only one side knows has not.

    Args:
        defaults: what a key that an earlier version did not have comes to unless it is set.
    """
    return [*_keys(recorded, now, defaults or {}), *_files(recorded, now), *_scripts(recorded, now), *_versions(recorded, now)]


def _keys(recorded: Fingerprint, now: Fingerprint, defaults: Mapping[str, Any]) -> Iterator[Change]:
    for key in (*(each for each in CLASSES if each in now.keys), *(each for each in now.keys if each not in CLASSES)):
        if key in FILES and key in recorded.contents and key in now.contents:
            continue
        if key not in recorded.keys and key not in defaults:
            continue
        old, new = recorded.keys.get(key, defaults.get(key)), now.keys[key]
        if old != new:
            yield Change(key, old, new, kind_of(key))


def _files(recorded: Fingerprint, now: Fingerprint) -> Iterator[Change]:
    for key in FILES:
        old, new = recorded.contents.get(key), now.contents.get(key)
        if old is None or new is None:
            continue
        named, names = recorded.keys.get(key), now.keys.get(key)
        if old != new or _weights(named) != _weights(names):
            yield Change(key, _described(named, old), _described(names, new), kind_of(key))
        elif named != names:
            yield Change(key, named, names, "told")  # the same, in another place


def _scripts(recorded: Fingerprint, now: Fingerprint) -> Iterator[Change]:
    old, new = recorded.contents.get("entrypoint"), now.contents.get("entrypoint")
    if old and new and old != new:
        name = now.keys.get("entrypoint")
        yield Change("entrypoint", _described(recorded.keys.get("entrypoint"), old), _described(name, new), "told")


def _versions(recorded: Fingerprint, now: Fingerprint) -> Iterator[Change]:
    if not recorded.versions or not now.versions:
        return
    for name in dict.fromkeys((*recorded.versions, *now.versions)):
        old, new = recorded.versions.get(name), now.versions.get(name)
        if old != new:
            yield Change(f"versions.{name}", old, new, "told")


def _weights(named: Any) -> list[Any] | None:
    """Of a blend of datasets."""
    if not isinstance(named, list):
        return None
    return [each.get("weight") if isinstance(each, Mapping) else None for each in named]


def _described(named: Any, contents: list[Content]) -> str:
    names = named if isinstance(named, list) else [named]
    paths = ", ".join(str(each.get("path")) if isinstance(each, Mapping) else str(each) for each in names)
    size = sum(each.size_bytes for each in contents)
    mark = ", ".join(each.sampled_sha256[:8] for each in contents[:3]) + (", …" if len(contents) > 3 else "")
    return f"{size:,} bytes, sha256 {mark}, in {paths}"
