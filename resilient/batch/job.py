"""A batch script as Slurm and bash will take it: what it asks for, its variables, its options and its programs. Pure."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from resilient.batch.shell import Command, Script, Word, parse, pieces

_VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)(?:\[[@*]\])?(?::?[-=]([^{}]*))?\})")
LONG = 20_000  # characters of a value
_SHORT = {
    "t": "time",
    "n": "ntasks",
    "N": "nodes",
    "c": "cpus-per-task",
    "A": "account",
    "p": "partition",
    "o": "output",
    "e": "error",
}
_WORKS = (
    "python",
    "torchrun",
    "accelerate",
    "deepspeed",
    "resilient",
    "mpirun",
    "mpiexec",
    "apptainer",
    "singularity",
    "bash",
    "sh",
)
_ABOUT = frozenset(  # programs that only put files or words somewhere, whatever these are
    shlex.split("[ [[ cat cd cp date echo export kill ln ls mkdir mv printf read rm rsync sleep test touch wait")
)


@dataclass(frozen=True)
class Asked:
    """One option of `#SBATCH`. Attributes: heeded: it stands before the first command, as sbatch wants it."""

    line: int
    name: str
    value: str
    heeded: bool


@dataclass(frozen=True)
class Setting:
    """An option of a program with its value, or a variable, with all variables in the value put in as far as they are known."""

    line: int
    name: str
    value: str
    shown: str  # as it is written


@dataclass
class Job:
    """The whole script. Attributes: asked: by name, those that are heeded."""

    script: Script
    every: list[Asked] = field(default_factory=list)
    asked: dict[str, Asked] = field(default_factory=dict)
    settings: list[Setting] = field(default_factory=list)  # options and KEY=VALUE of programs, and of strings that hold some
    variables: list[Setting] = field(default_factory=list)  # of the environment or of the shell, in order
    known: dict[str, str] = field(default_factory=dict)  # their values in the end
    _words: dict[int, list[str]] = field(default_factory=dict)  # by identity of the command

    @property
    def time_s(self) -> float | None:
        """Of the job; None: it does not say, or in words that Slurm does not know."""
        asked = self.asked.get("time")
        return duration_s(asked.value) if asked is not None else None

    def commands(self) -> list[Command]:
        return self.script.commands

    def words(self, command: Command) -> list[str]:
        """A command of it with the values of variables that the script has set, as bash would split it."""
        if id(command) not in self._words:
            self._words[id(command)] = [piece for word in command.words for piece in expanded(word.text, self.known).split()]
        return self._words[id(command)]


def read(text: str) -> Job:
    """A batch script."""
    job = Job(parse(text))
    first = min((command.line for command in job.script.commands), default=1 << 62)
    for line, comment in job.script.comments:
        if comment.startswith("#SBATCH"):
            for name, value in _options(comment.removeprefix("#SBATCH")):
                asked = Asked(line, name, value, line < first)
                job.every.append(asked)
                if asked.heeded:
                    job.asked[name] = asked
    for command in job.script.commands:
        _read(command, job)
    return job


def _options(text: str) -> Iterator[tuple[str, str]]:
    try:
        words = shlex.split(text, comments=True)
    except ValueError:
        words = text.split()
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if word.startswith("--"):
            name, given, value = word[2:].partition("=")
        elif len(word) > 1 and word[0] == "-":
            name, given, value = _SHORT.get(word[1], word[1]), word[2:], word[2:]
        else:
            continue
        if not given and at < len(words) and not words[at].startswith("-"):
            value = words[at]
            at += 1
        yield name, value


def _read(command: Command, job: Job) -> None:
    for at, (name, word) in enumerate(command.assigned):
        value = expanded(word.text, job.known)
        job.variables.append(Setting(word.line, name, value, f"{name}={word.text}"))
        job.known[name] = f"{job.known.get(name, '')} {value}" if at in command.added else value
        _settings([*pieces(word)], job)
    _settings([each for word in command.words for each in pieces(word)], job)


def _settings(words: list[Word], job: Job) -> None:
    for at, word in enumerate(words):
        text = word.text
        if text.startswith("--"):
            name, given, value = text[2:].partition("=")
            if not given and at + 1 < len(words) and not words[at + 1].text.startswith("-"):
                value = words[at + 1].text
                text = f"{text} {value}"
        elif (found := re.match(r"[A-Za-z_][\w.]*=", text)) is not None:
            name, value = found[0][:-1], text[found.end() :]
        else:
            continue
        job.settings.append(Setting(word.line, name, expanded(value, job.known), text))


def expanded(text: str, known: dict[str, str]) -> str:
    """With the values of variables that the script has set; others stay, and so does all of what would be too long."""
    new = _VARIABLE.sub(lambda found: known.get(found[1] or found[2], found[3] if found[3] is not None else found[0]), text)
    return new if len(new) <= LONG else text


def duration_s(text: str) -> float | None:
    """A time as sbatch takes it: minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM, D-HH:MM:SS; None if it is none, or without an end."""
    found = re.fullmatch(r"(?:(\d{1,9})-)?(\d{1,9})(?::(\d{1,9}))?(?::(\d{1,9}))?", text)
    if found is None:
        return None
    days, first, second, third = (int(each) if each is not None else None for each in found.groups())
    if days is not None:
        return 86400.0 * days + 3600.0 * (first or 0) + 60.0 * (second or 0) + (third or 0)
    if third is not None:
        return 3600.0 * (first or 0) + 60.0 * (second or 0) + third
    return 60.0 * (first or 0) + (second or 0)


def works(words: list[str]) -> bool:
    """Whether a command is what the job is there for, as far as its words tell: a program that trains, or a launcher of one."""
    return words[:1] != [] and words[0] not in _ABOUT and any(_program_works(word) for word in words)


def _program_works(word: str) -> bool:
    name = PurePosixPath(word).name
    return (
        name == "srun"
        or name.startswith("$")
        or any(re.fullmatch(rf"{each}[\d.]*", name) for each in _WORKS)
        or name.endswith(".py")
    )
