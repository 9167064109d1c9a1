"""The options of sbatch that a batch script gives, and the variables of the environment that would win over them. Pure."""

import shlex
from collections import defaultdict
from collections.abc import Iterable, Mapping

# Those of one letter by which a script may say what a chain has to know.
_LETTERS = {
    **{"A": "account", "a": "array", "C": "constraint", "c": "cpus-per-task", "d": "dependency", "e": "error", "J": "job-name"},
    **{"k": "no-kill", "N": "nodes", "n": "ntasks", "o": "output", "p": "partition", "q": "qos", "t": "time", "W": "wait"},
    **{"x": "exclude"},
}
_OF_CHAINS = ("job-name", "array", "dependency")  # known by their first letters as well, as sbatch knows them

_MEMORY = ("SBATCH_MEM_PER_NODE", "SBATCH_MEM_PER_CPU", "SBATCH_MEM_PER_GPU")  # one of them at most
_REQUEUE = ("SBATCH_REQUEUE", "SBATCH_NO_REQUEUE")
_VARIABLES = {
    "time": ("SBATCH_TIMELIMIT",),
    "requeue": _REQUEUE,
    "no-requeue": _REQUEUE,
    **dict.fromkeys(("mem", "mem-per-cpu", "mem-per-gpu"), _MEMORY),
}
_NEVER = frozenset({"SBATCH_ARRAY_INX", "SBATCH_WAIT"})  # many jobs in place of one; an sbatch that returns with the job's end


def in_script(text: str) -> dict[str, list[str]]:
    """What stands in the lines of #SBATCH: values by the option's long name, "" where it has none."""
    return named(line.removeprefix("#SBATCH") for line in text.splitlines() if line.startswith(("#SBATCH ", "#SBATCH\t")))


def named(lines: Iterable[str]) -> dict[str, list[str]]:
    """The same of lines without the #SBATCH before them."""
    found: dict[str, list[str]] = defaultdict(list)
    for line in lines:
        words = _words(line)
        for word, after in zip(words, [*words[1:], ""], strict=True):
            following = "" if after.startswith("-") else after
            if word.startswith("--"):
                name, equals, value = word[2:].partition("=")
                full = next((each for each in _OF_CHAINS if name and each.startswith(name)), name)
                found[full].append(value if equals else following)
            elif word.startswith("-") and word[1:2] in _LETTERS:
                found[_LETTERS[word[1]]].append(word[2:] or following)
    return dict(found)


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError:
        return line.split()


def overriding(options: Mapping[str, object]) -> frozenset[str]:
    """The variables that would win over these options of a script, and those that no job of a chain may have."""
    return _NEVER.union(*(_VARIABLES.get(name, (f"SBATCH_{name.upper().replace('-', '_')}",)) for name in options))
