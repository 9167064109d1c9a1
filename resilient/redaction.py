"""What a page or picture that may be sent to somebody leaves out: what is secret by what it is called or looks like. Pure."""

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import yaml

HIDDEN = "(hidden)"
# The last word of the name of a key; what is below such a key is secret, too. Several keys or tokens are by what they are for.
_NAME = (
    r"(?:urls?|token|secrets?|passwords?|passwd|passphrase|credentials?|auth|dsn|key|headers?|environment|apikeys?|authtoken|accesstoken"
    r"|(?:access|api|auth|gh|github|gitlab|hf|hub|private|secret|ssh|wandb)[-_](?:keys|tokens))"
)
_NAMED = rf"(?:[\w.-]*[-_.])?{_NAME}"
_IS_SECRET = re.compile(_NAMED, re.IGNORECASE)
_IS_OPTION = re.compile(rf"-{_NAMED}", re.IGNORECASE)

# In a line of shell, or in the words of a script: NAME=VALUE, --name VALUE, setenv NAME VALUE.
_WORD = r"(?:\"(?:\\.|[^\"\\])*\"|'[^']*'|\\.|[^\s\"';&|\\])"  # a part of one, as the shell takes it together
_BEFORE = rf"{_NAMED}=|-{_NAMED}\s+|(?:setenv|set[ \t]+-\w+)[ \t]+{_NAMED}[ \t]+"
_GIVEN = re.compile(
    rf"(?P<quote>['\"])(?P<within>{_NAMED}=)(?:(?!(?P=quote)).)*(?P=quote){_WORD}*|(?<![\w.-])(?P<name>{_BEFORE}){_WORD}+",
    re.IGNORECASE | re.DOTALL,
)
_LOGIN = re.compile(rf"\b((?:wandb|docker|podman)[ \t]+login[ \t]+){_WORD}+(?:[ \t]+{_WORD}+)*")
# In a header: Authorization: Bearer VALUE, X-API-Key: VALUE.
_SENT = re.compile(
    r"(?<![\w-])((?:proxy-)?authorization:\s*(?:(?:bearer|basic|token)\s+)?|[\w-]+-(?:key|token|secret):\s*)[^\s\"']+",
    re.IGNORECASE,
)
# By what it looks like, wherever it stands: of Hugging Face, GitHub, GitLab, OpenAI and others, AWS, Slack; a JSON web token.
_LIKE_ONE = re.compile(
    r"(?<![\w-])(?:hf_[A-Za-z0-9]{16,}|gh[oprsu]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|sk-[\w-]*[A-Za-z0-9]{16}[\w-]*"
    r"|(?:AKIA|ASIA)[A-Z0-9]{12,}|xox[abprs]-[\w-]{10,}|eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]+)"
)
_ACCOUNT = re.compile(r"(?<=://)[^\s/@'\"]+@")


def hidden(key: str, value: Any) -> Any:
    """The value of a key without what is secret. Args: key: with dots."""
    if isinstance(value, Mapping):
        return {name: hidden(f"{key}.{name}", each) for name, each in value.items()}
    if isinstance(value, list):
        before = ["", *value]
        return [HIDDEN if _is_given(option, each) else hidden(key, each) for option, each in zip(before, value, strict=False)]
    if not isinstance(value, str) or not value:
        return value
    if any(_IS_SECRET.fullmatch(part) for part in key.split(".")):
        return HIDDEN
    value = hidden_text(value)
    return _without_account(value) if "://" in value else value


def _is_given(option: Any, value: Any) -> bool:
    """Whether a word of a list is the secret value of the option before it."""
    return isinstance(option, str) and isinstance(value, str) and value != "" and _IS_OPTION.fullmatch(option) is not None


def hidden_text(text: str) -> str:
    """A line of shell, or what a person or a program has written, without what is secret."""
    text = _GIVEN.sub(rf"\g<quote>\g<within>\g<name>{HIDDEN}\g<quote>", text)
    for before in (_LOGIN, _SENT):
        text = before.sub(rf"\g<1>{HIDDEN}", text)
    return _ACCOUNT.sub(f"{HIDDEN}@", _LIKE_ONE.sub(HIDDEN, text))


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
