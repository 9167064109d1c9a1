"""Variables in the paths of a config: `${name}`, `${run_dir}`, and those of the environment."""

import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from resilient.config.errors import Problem, shown
from resilient.config.schema import Config

_VARIABLE = re.compile(r"\$(?:\{([^}]*)\}|([A-Za-z_][A-Za-z0-9_]*))")


def expanded(config: Config, environ: Mapping[str, str]) -> tuple[Config, list[Problem]]:
    """The config with variables in paths replaced and paths made absolute."""
    problems: list[Problem] = []

    def whole(key: str, path: Path, own: Mapping[str, str]) -> Path:
        def value(match: re.Match[str]) -> str:
            name = match[1] if match[1] is not None else match[2]
            found = own.get(name, environ.get(name))
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
        escaped = os.fsencode(found).decode(errors="backslashreplace")
        if escaped != str(found):
            problems.append(Problem(key, None, f"{escaped} has bytes that are not UTF-8, in which run directories are written"))
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
        return value

    return config.model_copy(update=below(config, "")), problems
