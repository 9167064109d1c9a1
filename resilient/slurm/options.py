"""The options of sbatch that a batch script gives, and the variables of the environment that would win over them. Pure."""

import shlex
from collections import defaultdict
from collections.abc import Iterator, Mapping

# The options of sbatch of Slurm 22.05 to 26.11. Those of one letter:
_LETTERS = {
    **{"A": "account", "a": "array", "B": "extra-node-info", "b": "begin", "C": "constraint", "c": "cpus-per-task", "D": "chdir"},
    **{"d": "dependency", "e": "error", "F": "nodefile", "G": "gpus", "H": "hold", "h": "help", "i": "input", "J": "job-name"},
    **{"k": "no-kill", "L": "licenses", "M": "clusters", "m": "distribution", "N": "nodes", "n": "ntasks", "O": "overcommit"},
    **{"o": "output", "p": "partition", "Q": "quiet", "q": "qos", "S": "core-spec", "s": "oversubscribe", "t": "time"},
    **{"V": "version", "v": "verbose", "W": "wait", "w": "nodelist", "x": "exclude"},
}
# Those whose value, if they have one, is in the same word:
_ALONE = frozenset(
    shlex.split(
        "consolidate-segments contiguous exclusive external get-user-env help hold ignore-pbs nice no-kill no-requeue "
        "oom-kill-step overcommit oversubscribe parsable propagate quiet reboot requeue resv-ports spread-job spread-segments "
        "stepmgr test-only usage use-min-nodes verbose version wait"
    )
)
_WITH_VALUE = frozenset(
    shlex.split(
        "account acctg-freq array batch bb bbf begin chdir cluster cluster-constraint clusters comment constraint container "
        "container-id context core-spec cores-per-socket cpu-freq cpus-per-gpu cpus-per-task deadline delay-boot dependency "
        "distribution error exclude export export-file extra extra-node-info gid gpu-bind gpu-freq gpus gpus-per-node "
        "gpus-per-socket gpus-per-task gres gres-flags hint input job-name kill-on-invalid-dep licenses mail-type mail-user "
        "mcs-label mem mem-bind mem-per-cpu mem-per-gpu mem-update mincpus network nodefile nodelist nodes ntasks "
        "ntasks-per-core ntasks-per-gpu ntasks-per-node ntasks-per-socket ntasks-per-tres open-mode output partition power "
        "prefer priority profile qos reservation resources runtime segment signal sockets-per-node switches tasks-per-node "
        "thread-spec threads-per-core time time-min tmp tres-bind tres-per-task uid wait-all-nodes wckey wrap "
    )
)

_MEMORY = ("SBATCH_MEM_PER_NODE", "SBATCH_MEM_PER_CPU", "SBATCH_MEM_PER_GPU")  # one of them at most
_REQUEUE = ("SBATCH_REQUEUE", "SBATCH_NO_REQUEUE")
_SPECIALIZED = ("SBATCH_CORE_SPEC", "SBATCH_THREAD_SPEC")  # cores or threads
_VARIABLES = {
    "bb": ("SBATCH_BURST_BUFFER",),
    "cluster": ("SBATCH_CLUSTERS",),
    "core-spec": _SPECIALIZED,
    "cpu-freq": ("SBATCH_CPU_FREQ_REQ",),
    "oversubscribe": ("SBATCH_EXCLUSIVE",),
    "segment": ("SBATCH_SEGMENT_SIZE",),
    "switches": ("SBATCH_REQ_SWITCH", "SBATCH_WAIT4SWITCH"),
    "thread-spec": _SPECIALIZED,
    "time": ("SBATCH_TIMELIMIT",),
    "requeue": _REQUEUE,
    "no-requeue": _REQUEUE,
    **dict.fromkeys(("mem", "mem-per-cpu", "mem-per-gpu"), _MEMORY),
}
_NEVER = frozenset({"SBATCH_ARRAY_INX", "SBATCH_WAIT"})  # many jobs in place of one; an sbatch that returns with the job's end


def in_script(text: str) -> dict[str, list[str]]:
    """What stands in the lines of #SBATCH: values by the option's long name, "" where it has none.

    They are read as getopt_long(3) reads them, the words of all lines as those of one. A shortened name that may be that of several
    options, as another version of sbatch may have them, counts for each of them.
    """
    found: dict[str, list[str]] = defaultdict(list)
    lines = (line.removeprefix("#SBATCH") for line in text.splitlines() if line.startswith(("#SBATCH ", "#SBATCH\t")))
    words = iter([word for line in lines for word in _words(line)])
    for word in words:
        if word == "--":
            break
        for name, value in _long(word, words) if word.startswith("--") else _bundle(word, words):
            found[name].append(value)
    return dict(found)


def _long(word: str, after: Iterator[str]) -> Iterator[tuple[str, str]]:
    """An option by its name. Args: after: the words that come next, of which its value is taken."""
    name, equals, value = word[2:].partition("=")
    known = _ALONE | _WITH_VALUE
    names = [name] if name in known else sorted(each for each in known if each.startswith(name)) or [name]  # one of a plugin
    if not equals and not _WITH_VALUE.isdisjoint(names):
        value = next(after, "")
    yield from ((each, value) for each in names)


def _bundle(word: str, after: Iterator[str]) -> Iterator[tuple[str, str]]:
    """Options of one letter in one word, the last of which may have a value. Args: after: as for `_long`."""
    letters = word[1:] if word.startswith("-") else ""
    while letters and (name := _LETTERS.get(letters[0])) is not None:
        letters = letters[1:]
        if name in _WITH_VALUE:
            yield name, letters or next(after, "")
            return
        if name == "no-kill":
            yield name, letters
            return
        yield name, ""


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError:
        return line.split()


def overriding(options: Mapping[str, object]) -> frozenset[str]:
    """The variables that would win over these options of a script, and those that no job of a chain may have."""
    return _NEVER.union(*(_VARIABLES.get(name, (f"SBATCH_{name.upper().replace('-', '_')}",)) for name in options))
