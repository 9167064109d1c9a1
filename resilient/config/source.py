"""Reading a config: YAML with the line of every key, overrides, and pydantic's findings in plain words.

Owns the way from text to a checked `Config` and from an error back to the line that caused it.
"""

import datetime
import difflib
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from resilient.config import checks, document, paths, profile, warmup
from resilient.config.annotations import Key, allowed, allowed_keys, keys_called, keys_of, meant, section_of, walk
from resilient.config.document import AmbiguousNumber, NotADocument
from resilient.config.errors import COMMAND_LINE, ConfigError, Problem, shown
from resilient.config.schema import Config

LENGTH: tuple[Key, Key] = (("train", "steps"), ("train", "samples"))  # two ways to say how long a run is
PLACE = ("name", "run_dir", "run_dir_mode")
REPORTED = 50  # problems at once
MOST = 4  # times as many are looked at: some are told by others
MOST_MEANT = 3  # keys that a misplaced one is told to be
WRITTEN = "# Written by resilient"  # how a config begins that `write` has written
OF_A_KEY = "[key]"  # how pydantic ends the place of a key that is wrong, where the place of its value has nothing
_READ_AS = (bool, int, float, datetime.date)  # what YAML makes of some texts that are not in quotes
VARIABLES: Key = ("slurm", "environment")  # are text: a number stays as it is written, for 1.10 is not 1.1
WARMUP: tuple[Key, Key] = (("optimizer", "warmup_samples"), ("optimizer", "warmup_tokens"))


@dataclass(frozen=True)
class Site:
    """A profile, as far as a config has taken values from it, and where they stand in its file."""

    file: Path
    given: dict[Key, Any]
    lines: dict[Key, int]


@dataclass
class Source:
    """A config as it was written: plain values, and where each key stands.

    Attributes:
        site: the profile that gave values which are not written there.
    """

    file: Path
    values: dict[str, Any]
    lines: dict[Key, int]
    site: "Site | None" = None

    def problem(self, key: Key, value: object, message: str) -> Problem:
        """A problem at a key, or at the nearest key around it that is written anywhere."""
        written = {line for other, line in self.lines.items() if key and other[: len(key)] == key}
        if written == {COMMAND_LINE}:  # a section may be there only since a key in it was overridden
            return Problem(".".join(key), value, message, None, COMMAND_LINE)
        for end in range(len(key), 0, -1):
            line = self.lines.get(key[:end])
            if line == COMMAND_LINE:
                return Problem(".".join(key), value, message, None, COMMAND_LINE)
            if line is not None:
                return Problem(".".join(key), value, message, self.file, line)
            if self.site is not None and key[:end] in self.site.lines:
                return Problem(".".join(key), value, message, self.site.file, self.site.lines[key[:end]])
        return Problem(".".join(key), value, message, self.file)

    def overridden(self, *keys: Key) -> bool:
        """Whether the command line has set one of these keys, or a section that holds one."""
        return any(self.lines.get(key[:end]) == COMMAND_LINE for key in keys for end in range(1, len(key) + 1))


def read(path: Path, overrides: Sequence[str]) -> Source:
    """The file's values with the overrides applied, and below them those of the site. Raises ConfigError if they cannot be read."""
    source = parse(path)
    problems = [problem for override in overrides for problem in _override(source, override)]
    if problems:
        raise ConfigError(reported(problems))
    for each, other in (LENGTH, LENGTH[::-1]):
        _give_way(source, each, to=other)
    return _at_its_site(source)


def _give_way(source: Source, key: Key, *, to: Key) -> None:
    """Drop a key of the file that says otherwise what the command line says."""
    if source.lines.get(to) == COMMAND_LINE and _lookup(source.values, to) != "null" and source.lines.get(key, COMMAND_LINE) > 0:
        del source.values[key[0]][key[1]], source.lines[key]


def _at_its_site(source: Source) -> Source:
    """With the values of its profile for what it does not say itself. Raises ConfigError."""
    slurm = source.values.get("slurm")
    name = slurm.get("profile", profile.GENERIC) if isinstance(slurm, dict) else profile.GENERIC
    if not isinstance(name, str):
        return source  # the schema says what is wrong with it
    path = profile.find(name)
    if path is None:
        raise ConfigError([source.problem(("slurm", "profile"), name, profile.unknown(name))])
    site = parse(path)
    if isinstance(site.values.get("slurm"), dict) and "profile" in site.values["slurm"]:
        raise ConfigError([site.problem(("slurm", "profile"), None, "a profile does not name another one")])
    taken = profile.fill(source.values, site.values)
    lines = {key: line for key, line in site.lines.items() if any(key[: len(each)] == each for each in taken)}
    return replace(source, site=Site(path, taken, lines))


def load(path: Path, overrides: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> Config:
    """Read and check a config.

    Args:
        overrides: `KEY=VALUE`, dotted keys, values as YAML.
        environ: for variables in paths; the process's own by default.

    Raises:
        ConfigError: with every problem that was found.
    """
    path = Path(path)
    source = read(path, overrides)
    try:
        config = Config.model_validate(source.values)
    except ValidationError as error:
        found = error.errors(include_url=False)
        problems = [in_words(source, dict(each)) for each in found[: MOST * REPORTED]]
        raise ConfigError(reported(ordered(problems), len(found) - len(problems))) from None
    written = _written(source, overrides)
    if written is not None:
        config = warmup.fitted(config, written)
    config, problems = paths.expanded(config, os.environ if environ is None else environ)
    problems += checks.check(config)
    if problems:
        raise ConfigError(ordered([attributed(source, problem) for problem in problems]))
    return config


def place(path: Path, overrides: Sequence[str] = ()) -> Config:
    """What a file says of the campaign's name and run directory, whatever is wrong with the rest of it. Raises ConfigError."""
    values = read(path, overrides).values
    try:
        config = Config.model_validate({key: values[key] for key in PLACE if key in values})
    except ValidationError:
        raise ConfigError([Problem("run_dir", None, "cannot be told", path)]) from None
    config, problems = paths.expanded(config, os.environ)
    if problems:
        raise ConfigError(problems)
    return config


def notes(path: Path, overrides: Sequence[str] = ()) -> list[str]:
    """What came out otherwise than the file says, a line each, because of what the command line says. Raises ConfigError."""
    written = _written(read(path, overrides), overrides)
    line = warmup.described(load(path, overrides), written) if written is not None else None
    return [line] if line is not None else []


def _written(source: Source, overrides: Sequence[str]) -> Config | None:
    """The config as the file alone has it, where its warm-up may have to follow a command line that does not name one."""
    if not overrides or source.overridden(*WARMUP):
        return None
    try:
        return Config.model_validate(read(source.file, ()).values)
    except (ConfigError, ValidationError):
        return None  # only with the command line is it a config


def from_site(path: Path, overrides: Sequence[str] = ()) -> dict[str, object]:
    """What the config has from its site's profile, by dotted key. Raises ConfigError."""
    site = read(Path(path), overrides).site
    return {".".join(key): value for key, value in site.given.items()} if site is not None else {}


def attribute(error: ConfigError, path: Path, overrides: Sequence[str] = ()) -> ConfigError:
    """The same error with file and line where they are missing."""
    try:
        source = read(Path(path), overrides)
    except ConfigError:
        return error
    return ConfigError([attributed(source, problem) for problem in error.problems])


def write(config: Config, path: Path) -> None:
    """Put the config into a file, marked as written by this runtime, at once or not at all. Raises OSError."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(f"{WRITTEN}, and anew at each start: comments do not stay.\n{dump(config)}", encoding="utf-8")
    new.replace(path)


def dump(config: Config) -> str:
    """YAML that loads to an equal config."""
    values = config.model_dump(mode="json")
    # A text to prepare and a path that is prepared exclude each other, so what is off is left out.
    values["data"] = {name: value for name, value in values["data"].items() if value is not None}
    if config.target_step is None:
        del values["train"]["steps"]  # a default: only the script knows
    if profile.is_file(config.slurm.profile):
        del values["slurm"]["profile"]  # all that it gave stands here, and where this is read it may not be there
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


# -- text to values ----------------------------------------------------------------------------------------------------


def parse(path: Path, what: str = "a config") -> Source:
    """The values of a file as they are written, and the lines of all keys. Raises ConfigError."""
    try:
        node = document.compose(document.text_of(path))
    except NotADocument as error:
        raise ConfigError([Problem("", None, error.message, path, error.line)]) from None
    if node is None:
        return Source(path, {}, {})
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError([Problem("", None, f"{what} is a mapping of keys to values", path, node.start_mark.line + 1)])
    lines: dict[Key, int] = {}
    problems = list(islice(_index(path, node, (), lines), REPORTED + 1))
    if problems:
        raise ConfigError(reported(problems))
    try:
        values = document.construct(node)
    except NotADocument as error:
        raise ConfigError([Problem("", None, error.message, path, error.line)]) from None
    _keep_as_written(node, values, VARIABLES)
    return Source(path, values, lines)


def _keep_as_written(node: yaml.Node | None, values: Any, below: Key) -> None:
    """Put numbers among `VARIABLES` into the values as texts.

    Args:
        node: that they were constructed from, with merges resolved.
        below: where the variables are in them.
    """
    for part in below:
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        found = next((value for key, value in reversed(pairs) if key.value == part), None)
        if found is None or not isinstance(values, dict):
            return
        node, values = found, values[part]
    if isinstance(node, yaml.MappingNode) and isinstance(values, dict):
        last = {key.value: value for key, value in node.value}
        values |= {name: value.value for name, value in last.items() if document.is_number(value)}


def _index(path: Path, node: yaml.Node, at: Key, lines: dict[Key, int]) -> Iterator[Problem]:
    """Record the line of every key below `node`; yields keys that are no text, or stand twice."""
    if isinstance(node, yaml.MappingNode):
        own = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if key_node.tag == "tag:yaml.org,2002:merge":
                yield from _index(path, value_node, at, lines)
                continue
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != "tag:yaml.org,2002:str":
                if isinstance(key_node, yaml.ScalarNode):
                    what = f"the key {key_node.value!r} is not text; put it in quotes"
                else:
                    what = f"the key {shown(' '.join(document.written(key_node).split()))} is not text, as all keys are"
                yield Problem(".".join(at), None, what, path, line)
                continue
            key = (*at, key_node.value)
            if key in lines and not (at and own[key_node.value] == 1):  # the other line came in by a merge key
                yield Problem(".".join(key), None, f"stands twice; it was set in line {lines[key]} already", path, line)
                continue
            lines[key] = line
            yield from _index(path, value_node, key, lines)
    elif isinstance(node, yaml.SequenceNode):
        for number, entry in enumerate(node.value):
            lines[(*at, str(number))] = entry.start_mark.line + 1
            yield from _index(path, entry, (*at, str(number)), lines)


def _override(source: Source, override: str) -> Iterator[Problem]:
    name, equals, text = override.partition("=")
    key = tuple(name.split("."))
    if not equals or not all(key) or len(key) > document.LIMIT_DEPTH:
        yield Problem("", None, f"{shown(override)!r} is not KEY=VALUE, as in train.steps=200", None, COMMAND_LINE)
        return
    try:
        node = document.compose(text)
        value = text if document.is_cut_short(node, text) else document.construct(node)
        if node is not None and len(key) == len(VARIABLES) + 1 and key[:-1] == VARIABLES and document.is_number(node):
            value = node.value
        elif key == VARIABLES[: len(key)]:
            _keep_as_written(node, value, VARIABLES[len(key) :])
    except AmbiguousNumber as error:
        yield Problem(name, None, error.message, None, COMMAND_LINE)
        return
    except NotADocument:
        value = text
    target: Any = source.values
    for depth, part in enumerate(key[:-1]):
        step = _entry(target, part, create=not isinstance(target, list) and _number(key[depth + 1]) is None)
        if step is None:
            yield Problem(name, None, f"there is no {'.'.join(key[: depth + 1])} to set this in", None, COMMAND_LINE)
            return
        target = step
    if isinstance(target, dict):
        target[key[-1]] = value
    elif isinstance(target, list) and (place := _number(key[-1])) is not None and place < len(target):
        target[place] = value
    else:
        yield Problem(name, None, f"{'.'.join(key[:-1])} has no entry {key[-1]!r}", None, COMMAND_LINE)
        return
    for written in [line for line in source.lines if line[: len(key)] == key]:
        del source.lines[written]
    source.lines[key] = COMMAND_LINE


def _entry(target: object, part: str, *, create: bool) -> Any:
    if isinstance(target, dict):
        if target.get(part) is None and create:
            target[part] = {}
        return target.get(part)
    if isinstance(target, list) and (place := _number(part)) is not None and place < len(target):
        return target[place]
    return None


def _number(part: str) -> int | None:
    """The place in a list that a part of a key names, if it names one."""
    return int(part) if part.isascii() and part.isdigit() and len(part) < 10 else None


# -- findings in words -------------------------------------------------------------------------------------------------


def in_words(source: Source, found: Mapping[str, Any], root: type[BaseModel] = Config) -> Problem:
    """One of pydantic's findings as a problem that a person can act on. Args: root: the model of the whole file."""
    if found["loc"][-1:] == (OF_A_KEY,) and (keys := allowed_keys(walk(found["loc"][:-2], root)[1])) is not None:
        return source.problem(walk(found["loc"][:-1], root)[0], None, f"as a key, allowed: {keys}")
    key, annotation, field = walk(found["loc"], root)
    value = _lookup(source.values, key)
    if found["type"] == "extra_forbidden":
        section = section_of(key[:-1], root)
        names = keys_of(section) if section is not None else []
        near = [".".join(each) for each in keys_called(key[-1], root)] or difflib.get_close_matches(key[-1], names, n=1, cutoff=0.5)
        hint = f"did you mean {' or '.join(map(repr, near[:MOST_MEANT]))}? " if near else ""
        return source.problem(key, None, f"unknown key; {hint}allowed here: {', '.join(names)}")
    if found["type"] == "missing":
        return source.problem(key, None, "is missing")
    if found["type"] == "too_short":
        return source.problem(key, value, f"allowed: {allowed(annotation, field)}, not empty")
    if found["type"] == "finite_number":
        return source.problem(key, value, f"allowed: {allowed(annotation, field)}, and finite")
    if found["type"] == "string_unicode" and isinstance(value, str):
        return source.problem(key, None, paths.not_to_be_written(value) or "is no text")
    quote = "; put it in quotes" if found["type"] in ("string_type", "path_type") and isinstance(value, _READ_AS) else ""
    if isinstance(value, str) and (plain := meant(annotation, value)) is not None:
        return source.problem(key, repr(value), f"allowed: {allowed(annotation, field)}; this is text: write {plain}")
    return source.problem(key, value, f"allowed: {allowed(annotation, field)}{quote}")


def _lookup(values: Any, key: Key) -> object:
    for part in key:
        if isinstance(values, dict):
            values = values.get(part)
        elif isinstance(values, list) and part.isdigit() and int(part) < len(values):
            values = values[int(part)]
        else:
            return None
    return "null" if values is None else values


def attributed(source: Source, problem: Problem) -> Problem:
    """A problem with the file and line of its key, where it has none yet."""
    if problem.file is not None or problem.line is not None:
        return problem
    key = tuple(problem.key.split(".")) if problem.key else ()
    placed = source.problem(key, problem.value, problem.message)
    return replace(placed, key=problem.key)


def ordered(problems: Sequence[Problem]) -> list[Problem]:
    """By line, each once. Where a value has several forms, one that came close enough to fail inside is the one to tell of."""
    unique: dict[tuple[str, str], Problem] = {}
    for problem in problems:
        if not any(other.key.startswith(f"{problem.key}.") for other in problems):
            unique.setdefault((problem.key, problem.message), problem)
    return sorted(unique.values(), key=lambda problem: problem.line or 0)


def reported(problems: Sequence[Problem], beyond: int = 0) -> list[Problem]:
    """As many as a person reads, and how many more there are. Args: beyond: those that are not in `problems`."""
    more = len(problems) - REPORTED + beyond
    if more <= 0:
        return list(problems)
    return [*problems[:REPORTED], Problem("", None, "there are more problems than these; correct them first", problems[0].file)]
