"""The traps of batch scripts: a table of what is looked for, each with why it is one and what to write. Pure.

A trap is named only where the script itself shows it: a value that comes from outside is nobody's mistake.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from resilient.batch.job import Job, Setting, works
from resilient.batch.shell import Command
from resilient.config.sections.machines import IB_RETRIES
from resilient.network import VARIABLES, ib_covered_s
from resilient.slurm.script import SIGNAL_MAX_S


@dataclass(frozen=True)
class Finding:
    """One trap in a script.

    Attributes:
        trap: its name in the table of docs/doctor.md.
        found: what stands there.
        write: what to write in its place.
    """

    line: int
    trap: str
    found: str
    why: str
    write: str


Trap = Callable[[Job], Iterator[Finding]]

_JOB_ID = re.compile(r"\$\{?SLURM_(ARRAY_)?JOB_?ID\b|\$\{?PBS_JOBID\b")
_STATE = re.compile(
    r"(^|[._-])(save|load|resume|ckpts?|checkpoints?|run_?dir|output_dir|resume_from)($|[._-](dir|path|folder|root|from|checkpoint))",
    re.I,
)
_OF_A_NODE = re.compile(r"^(/tmp|/dev/shm|/local|/scratch/local|\$\{?(SLURM_)?TMPDIR|\$\{?LOCALSCRATCH)\b")
_VARIABLE = re.compile(r"\$\{[^{}]*\}|\$\w+")
_BITS = {"NCCL_IB_TIMEOUT": 5, "NCCL_IB_RETRY_CNT": 3}  # that the hardware has for it
_LOADS, _ASKS = ("load", "add", "swap", "switch", "purge", "use", "restore"), ("list", "avail", "av", "spider", "show")
_EXIT_MINUTES = ("exit-duration-in-mins", "exit_duration_in_mins")


def unclosed(job: Job) -> Iterator[Finding]:
    """A quote or a bracket that is opened and never closed."""
    for line, opened in job.script.unclosed[:1]:  # what follows is read askew
        yield Finding(
            line, "quotes", f"this {opened} is never closed",
            "bash reads on to the end of the file, and runs nothing of what was meant behind it", "close it where the text ends",
        )  # fmt: skip


def brackets(job: Job) -> Iterator[Finding]:
    """Brackets in a string that is run as a command, which bash checks only when it is run."""
    run = [command for command in job.commands() if works(job.words(command))]
    names = {name for command in run for word in command.words for name in re.findall(r"\$\{?(\w+)", word.text)}
    for setting in job.variables:
        if setting.name in names and (what := _unbalanced(setting.value)):
            yield Finding(
                setting.line, "brackets", f"{setting.name} holds {what}",
                "the string is run as a command, and ends with a syntax error, or the bracket goes to the program as a word",
                "take it out, or add the other one",
            )  # fmt: skip
    for command in run:
        for option, word in pairwise(command.words):
            if option.text == "-c" and (what := _unbalanced(_VARIABLE.sub("", word.text))):
                yield Finding(
                    word.line, "brackets", f"a command in quotes holds {what}",
                    "the shell that runs it ends with a syntax error", "take it out, or add the other one",
                )  # fmt: skip


def _unbalanced(text: str) -> str:
    """The bracket or quote of a text that has no other one, in words; empty if all have."""
    opened: list[str] = []
    quote = ""
    for char in text:
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char in "([{":
            opened.append(char)
        elif char in ")]}" and (not opened or "([{".index(opened.pop()) != ")]}".index(char)):
            return f"a {char} that nothing opens"
    return f"a {quote} that is not closed" if quote else f"a {opened[0]} that is not closed" if opened else ""


def background(job: Job) -> Iterator[Finding]:
    """Work that nobody waits for."""
    commands = job.commands()
    for at, command in enumerate(commands):
        words = job.words(command)
        if not command.background or not works(words):
            continue
        later = commands[at + 1 :]
        waited = any(each.program in ("wait", "fg") for each in later)
        held = any(not each.background and works(job.words(each)) for each in later)
        if not waited and not held:
            yield Finding(
                command.line, "background", f"{_shown(command)} &",
                "the script ends at once, and with it the job and all that it runs",
                "`wait` at the end (`wait $!` passes the exit code on), or leave the & out",
            )  # fmt: skip


def by_job(job: Job) -> Iterator[Finding]:
    """A place of checkpoints that the next job does not find."""
    told: set[str] = set()  # variables: where one is used, its own line is the one to change
    for setting in (*job.variables, *job.settings):
        if not _STATE.search(setting.name) or not _JOB_ID.search(setting.value) or _OF_A_NODE.match(setting.value):
            continue
        if not told.intersection(re.findall(r"\$\{?(\w+)", setting.shown)) and setting.name not in told:
            told.add(setting.name)
            yield Finding(
                setting.line, "job id", setting.shown,
                "the next job has another id, finds no checkpoint in its directory, and starts from the beginning",
                "a name that stays, as $SCRATCH/my-campaign; the id belongs into names of logs",
            )  # fmt: skip


def durations(job: Job) -> Iterator[Finding]:
    """Times at which the program is to stop by itself, and Slurm is there before it."""
    limit_s = job.time_s
    if limit_s is None:
        return
    limit = f"the time limit of {limit_s / 60:g} min (line {job.asked['time'].line})"
    why = "Slurm kills the job at its limit, before the program stops by itself and saves its state"
    fit = f"at least some minutes less than {limit_s / 60:g} min, so that a checkpoint fits in between"
    for setting in job.settings:
        if setting.name in _EXIT_MINUTES and (minutes := _number(setting.value)) is not None and 60 * minutes >= limit_s:
            yield Finding(setting.line, "exit duration", f"{setting.shown}, past {limit}", why, fit)
    for command in job.commands():
        words = job.words(command)
        if command.program == "timeout":
            spans = [span for word in words[1:] if (span := _span_s(word)) is not None]
            if spans and spans[0] >= limit_s:
                yield Finding(command.line, "exit duration", f"{_shown(command)}, past {limit}", why, fit)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _span_s(text: str) -> float | None:
    """A time as timeout(1) takes it."""
    found = re.fullmatch(r"(\d+(?:\.\d*)?)([smhd]?)", text)
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[found[2]] if found is not None else None


def network(job: Job) -> Iterator[Finding]:
    """Variables of NCCL, UCX, gloo and torch that are out of range."""
    allowed = {name: variable for variable in VARIABLES for name in (variable.name, *variable.legacy)}
    for setting in _once(job):
        variable = allowed.get(setting.name)
        if variable is None or not setting.value or "$" in setting.value or variable.is_good(setting.value):
            continue
        yield Finding(setting.line, "range", setting.shown, _cut(setting), f"{setting.name}: {variable.allowed}")


def _once(job: Job) -> Iterator[Setting]:
    """Variables of the environment, also those that a program such as env or srun is told."""
    yield from job.variables
    for setting in job.settings:
        if setting.name == "export":
            for pair in setting.value.split(","):
                name, given, value = pair.partition("=")
                if given:
                    yield Setting(setting.line, name, value, pair)


def _cut(setting: Setting) -> str:
    """What becomes of a number that is out of range."""
    if setting.name not in _BITS or re.fullmatch(r"\d{1,9}", setting.value) is None:
        return "the library does not take it, and goes on with another value or ends"
    left = int(setting.value) % (1 << _BITS[setting.name])
    covers = f", which covers {ib_covered_s(left, IB_RETRIES[1]):.2g} s with {IB_RETRIES[1]} retries"
    return f"the driver keeps the low bits of it: it acts as {left}{covers if setting.name == 'NCCL_IB_TIMEOUT' else ''}"


def no_signal(job: Job) -> Iterator[Finding]:
    """A job that is not told of its end."""
    if "signal" not in job.asked and any(works(job.words(command)) for command in job.commands()):
        yield Finding(
            1, "signal", "no #SBATCH --signal",
            "the first that a program hears of the time limit is the SIGTERM at it, 30 s before SIGKILL",
            "#SBATCH --signal=B:USR1@300, and `exec` before the last command",
        )  # fmt: skip


def deaf_shell(job: Job) -> Iterator[Finding]:
    """A signal to the batch shell, which neither passes it on nor survives it."""
    asked = job.asked.get("signal")
    if asked is None:
        return
    found = re.fullmatch(r"([BR]+:)?(?:SIG)?(\w+)(?:@(\d{1,9}))?", asked.value)
    if found is None:
        yield Finding(asked.line, "signal", f"--signal={asked.value}", "sbatch refuses it", "--signal=B:USR1@300")
        return
    lead_s = int(found[3] or 60)
    limit_s = job.time_s
    if lead_s > SIGNAL_MAX_S or (limit_s is not None and lead_s >= limit_s):
        yield Finding(
            asked.line, "signal", f"--signal={asked.value}",
            "the signal comes as soon as the job starts, since it is asked for earlier than that",
            "fewer seconds than the job has",
        )  # fmt: skip
    traps_ = [command.words[1:] for command in job.commands() if command.program == "trap"]
    trapped = any(word.text.removeprefix("SIG") == found[2] for words in traps_ for word in words)
    last = [command for command in job.commands() if works(job.words(command))]
    if "B" in (found[1] or "") and not trapped and last and last[-1].program != "exec":
        yield Finding(
            asked.line, "signal", f"--signal={asked.value}",
            f"it goes to the batch shell alone, which has no trap for {found[2]} and dies of it, and the job with it",
            f"`exec` before the last command (line {last[-1].line}), or a trap that passes the signal on",
        )  # fmt: skip


def kill_on_bad_exit(job: Job) -> Iterator[Finding]:
    """A step that one rank's end takes down."""
    if job.known.get("SLURM_KILL_BAD_EXIT") == "0":
        return
    for command in job.commands():
        words = job.words(command)
        if "srun" not in words[:3] or not _trains(words[words.index("srun") + 1 :]):
            continue
        text = " ".join(words)
        if re.search(r"--kill-on-bad-exit[= ]0\b|(^| )-K ?0\b|(^| )(-n ?|--ntasks[= ])1( |$)", text):
            continue
        yield Finding(
            command.line, "bad exit", _shown(command),
            "where the site kills steps on a bad exit, one rank that ends takes all others along, and whoever would restart it",
            "srun --kill-on-bad-exit=0",
        )  # fmt: skip


def _trains(words: list[str]) -> bool:
    """Whether a step runs more than a short command of the system: its program, or a command in quotes, trains."""
    return works([word for word in words if word != "srun"])


def modules(job: Job) -> Iterator[Finding]:
    """Modules that go before the environment that they were to be under."""
    active: Command | None = None
    for command in job.commands():
        program, *rest = [word.text for word in command.words] or [""]
        of_venv = program in ("source", ".") and bool(rest) and rest[0].endswith("/activate")
        if of_venv or (program in ("conda", "mamba", "micromamba") and rest[:1] == ["activate"]):
            active = command
        loads = program == "module" and bool(rest) and rest[0] in _LOADS
        loads = loads or (program == "ml" and bool(rest) and rest[0] not in _ASKS)
        if loads and active is not None:
            yield Finding(
                command.line, "modules", _shown(command),
                f"a module puts its own python and libraries before those of the environment of line {active.line}",
                f"load modules before line {active.line}",
            )  # fmt: skip


def late_options(job: Job) -> Iterator[Finding]:
    """Options that sbatch does not see."""
    for asked in job.every:
        if not asked.heeded:
            yield Finding(
                asked.line, "late option", f"#SBATCH --{asked.name}",
                "sbatch reads options up to the first command, and no further",
                "put it above the first command",
            )  # fmt: skip


TRAPS: tuple[Trap, ...] = (
    unclosed, brackets, late_options, no_signal, deaf_shell, modules, by_job, durations, network, background, kill_on_bad_exit,
)  # fmt: skip


def traps(job: Job) -> list[Finding]:
    """All of them, in the order of the script."""
    return sorted({finding for trap in TRAPS for finding in trap(job)}, key=lambda finding: (finding.line, finding.trap))


def _shown(command: Command) -> str:
    text = " ".join(" ".join(word.text for word in command.words).split())
    return text if len(text) <= 60 else f"{text[:59]}…"
