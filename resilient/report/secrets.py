"""What of a config does not go into a page that may be sent to somebody: values that are secret by what they are called. Pure."""

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import yaml

HIDDEN = "(hidden)"
# The last words of names of keys; what is below such a key is secret, too.
_SECRET = frozenset(
    {"url", "urls", "token", "secret", "password", "passwd", "credential", "credentials", "key", "header", "headers", "environment"}
)

# In a line of shell, or in the words of a script: NAME=VALUE, and --name VALUE, by the last word of the name.
_NAMES = "|".join(sorted(_SECRET))
_ASSIGNED = rf"(?:[\w.-]*[-_.])?(?:{_NAMES})="
_WORD = r"(?:\"(?:\\.|[^\"\\])*\"|'[^']*'|\\.|[^\s\"';&|\\])"  # a part of one, as the shell takes it together
_GIVEN = re.compile(
    rf"(?P<quote>['\"])(?P<within>{_ASSIGNED})(?:(?!(?P=quote)).)*(?P=quote){_WORD}*"
    rf"|(?<![\w.-])(?P<name>{_ASSIGNED}|--(?:[\w-]*[-_])?(?:{_NAMES})\s+){_WORD}+",
    re.IGNORECASE | re.DOTALL,
)


def hidden(key: str, value: Any) -> Any:
    """The value of a key without what is secret. Args: key: with dots."""
    if isinstance(value, Mapping):
        return {name: hidden(f"{key}.{name}", each) for name, each in value.items()}
    if isinstance(value, list):
        return [hidden(key, each) for each in value]
    if not isinstance(value, str) or not value:
        return value
    if any(part.replace("-", "_").rpartition("_")[2].lower() in _SECRET for part in key.split(".")):
        return HIDDEN
    value = _GIVEN.sub(rf"\g<quote>\g<within>\g<name>{HIDDEN}\g<quote>", value)
    return _without_account(value) if "://" in value else value


def _without_account(address: str) -> str:
    """An address without user, path and query, any of which may be a secret."""
    try:
        parts = urlsplit(address)
        return f"{parts.scheme}://{parts.hostname}/…" if parts.hostname else HIDDEN
    except ValueError:
        return HIDDEN


def hidden_config(text: str) -> str:
    """A config as YAML without what is secret; empty if it is none."""
    try:
        found = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError):
        return ""
    if not isinstance(found, dict):
        return ""
    return yaml.safe_dump({key: hidden(str(key), value) for key, value in found.items()}, sort_keys=False, allow_unicode=True)
