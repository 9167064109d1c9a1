"""Variables in the paths of a config: `${name}`, `${run_dir}`, and those of the environment; and what cannot be written down."""

import getpass
import os
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from resilient.config.errors import Problem, shown
from resilient.config.schema import Config

_NO_CHARACTER = re.compile("[\ud800-\udfff]")  # what stands for a byte of a command line or a variable that is no text
_VARIABLE = re.compile(r"\$(?:\{([^}]*)\}|([A-Za-z_][A-Za-z0-9_]*))")


def expanded(config: Config, environ: Mapping[str, str]) -> tuple[Config, list[Problem]]:
    """The config with variables in paths replaced, `${USER}` also where the environment has none, and paths made absolute."""
    problems: list[Problem] = []

    def whole(key: str, path: Path, own: Mapping[str, str]) -> Path:
        def value(match: re.Match[str]) -> str:
            name = match[1] if match[1] is not None else match[2]
            found = own.get(name, environ.get(name))
            if found is None and name == "USER":  # a container sets it for nobody
                found = _user()
            if found is None:
                problems.append(Problem(key, path, f"the environment variable {shown(name)} is not set"))
                return match[0]
            return found

        text = _VARIABLE.sub(value, str(path))
        try:
            found = Path(text).expanduser().absolute()
        except RuntimeError as error:
            problems.append(Problem(key, path, f"there is no such home directory: {error}"))
            return Path(text)
        why = not_to_be_written(found)
        if why is not None:
            problems.append(Problem(key, None, why))
        return found

    own = {"name": config.name}
    run_dir = whole("run_dir", config.run_dir, own)
    own["run_dir"] = str(run_dir)
    if config.is_script:  # words of a command: `$` is theirs, but for these two
        words = config.entrypoint
        for name, value in own.items():
            words = words.replace(f"${{{name}}}", shlex.quote(value))
        config = config.model_copy(update={"entrypoint": words})

    def below(model: BaseModel, at: str) -> dict[str, Any]:
        changes: dict[str, Any] = {}
        for name in type(model).model_fields:
            if (at, name) == ("", "run_dir"):
                changes[name] = run_dir
                continue
            value, key = getattr(model, name), f"{at}{name}"
            new = one(value, key)
            if new is not value:
                changes[name] = new
        return changes

    def one(value: Any, key: str) -> Any:
        if isinstance(value, Path):
            return whole(key, value, own)
        if isinstance(value, BaseModel):
            changes = below(value, f"{key}.")
            return value.model_copy(update=changes) if changes else value
        if isinstance(value, list):
            return [one(entry, f"{key}.{number}") for number, entry in enumerate(value)]
        if isinstance(value, dict):
            for name, entry in value.items():
                one(name, key)
                one(entry, f"{key}.{name}")
        elif isinstance(value, str) and _NO_CHARACTER.search(value):
            problems.append(Problem(key, None, not_to_be_written(value) or "is no text"))
        return value

    return config.model_copy(update=below(config, "")), problems


def _user() -> str:
    """The name of this user, or the number where it has none, as in a container that is run under any."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # the former before Python 3.13
        return str(os.getuid())


def not_to_be_written(path: Path | str) -> str | None:
    """What keeps a path or a text from being written down in a run directory, in UTF-8; None where nothing does."""
    encoding = sys.getfilesystemencoding()
    try:
        name = os.fsencode(path)
    except UnicodeEncodeError:
        name = str(path).encode(errors="backslashreplace")
    try:
        text = name.decode()
    except UnicodeDecodeError:
        escaped = name.decode(errors="backslashreplace")
        return f"{escaped} has bytes that are not UTF-8, in which run directories are written"
    if text == str(path) and (text.isascii() or encoding == "utf-8"):
        return None
    return f"{text} cannot be used while names of files are {encoding}, as the locale says; set LC_ALL=C.UTF-8 or PYTHONUTF8=1"
