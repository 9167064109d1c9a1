"""What a person sees while a campaign runs: a live line on a terminal, else plain lines, and plain lines in `driver.log` always.

Owns the words; it is told what happened and decides nothing.
"""

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.text import Text

from resilient import entries
from resilient.config.errors import shown_change
from resilient.driver.driver_log import DriverLog
from resilient.driver.terminal import PatientStream

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

PLAIN_EVERY_S = 5.0
STOPPED_S = 0.2  # for what is to be shown before the command is stopped
NEVER_STEPS = 1_000_000
_PROGRESS = re.compile(r"step \d+(/\d+)?(  |$)")

Line = Mapping[str, Any]


def harmless(text: str) -> str:
    """A text as one line, without what a terminal would act upon."""
    return "".join(each if each.isprintable() else " " if each.isspace() else "\N{REPLACEMENT CHARACTER}" for each in text)


def duration(seconds: float) -> str:
    """Seconds as a person reads them: 42 s, 3:05, 2:10:07."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    hours, rest = divmod(whole, 3600)
    minutes, secs = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{secs:02}" if hours else f"{minutes}:{secs:02}"


def local_time(t: float, form: str) -> str:
    """A time as `strftime` writes it. Args: t: unix seconds, which may be what a person has written for "never"."""
    try:
        return time.strftime(form, time.localtime(t))
    except (OverflowError, OSError, ValueError):
        return "beyond all calendars"


def size(count: float) -> str:
    """Bytes as a person reads them."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def without(left_out: Mapping[str, object]) -> str:
    """The devices that are left out, in words. Args: left_out: by node."""
    return "; ".join(
        f"device {', '.join(map(str, devices))} of node {node}" for node, devices in left_out.items() if isinstance(devices, list)
    )


def describe(line: Line) -> str | None:
    """An event of the ledger as a sentence, None for those that need no word."""
    match line["event"]:
        case "forked":
            return f"branched off {line['parent']} at step {line['step']}"
        case "config_changed":
            accepted = " (accepted)" * (line.get("accepted") is True)
            return f"changed: {line['key']}: {' → '.join(shown_change(line.get('from'), line.get('to')))}{accepted}"
        case "generation_started":
            resumed = line["resumed_step"]
            start = f"resumed at step {resumed}" if resumed else "from the start"
            left_out = line.get("left_out")
            less = f", without {without(left_out)}" if isinstance(left_out, dict) else ""
            return f"generation {line['generation']}: {line['world_size']} rank{'s' * (line['world_size'] != 1)}, {start}{less}"
        case "no_step_yet":
            return f"no step was finished yet, {duration(line['waited_s'])} after the start: {line['detail']}"
        case "fault":
            nodes = ", ".join(map(str, line["nodes"]))
            where = ", ".join(f"rank {rank}" for rank in line["ranks"]) or (f"node {nodes}" if nodes else "the job")
            at = f" at step {line['step']}" if line["step"] is not None else ""
            return f"fault {line['fault_id']}: {line['kind']}: {where}{at}: {line['detail']}"
        case "action":
            return f"  {line['name'].replace('_', ' ')}: {line['reason']}"
        case "recovered":
            return _describe_recovery(line)
        case "checkpoint_missed":
            told = f"; {line['count']:,} so far" if line["count"] > 1 else ""
            return f"step {line['step']} has no checkpoint on tier {line['tier']}: {line['reason']}{told}"
        case "checkpoint_rejected":
            return f"checkpoint of step {line['step']} refused: {line['reason']}"
        case "link":
            return _describe_link(line)
        case "health":
            found = "; ".join(f"{each['check']}: {each['text']}" for each in line["findings"])
            return f"node {line['node']} ({line['host']}) is {'not quite well' if line['ok'] else 'not fit'}: {found}"
        case "validation":
            return f"step {line['step']}: validation loss {entries.validation_loss(line):.4f}"
        case "cadence":
            return _describe_cadence(line)
        case "drain":
            return f"stopped by {line['signal']} after step {line['step']}, in {line['took_s']:.1f} s"
    return None


def _describe_recovery(line: Line) -> str:
    lost, downtime_s, down_s = line["lost_steps"], line["downtime_s"], line.get("down_s")
    if down_s is not None:
        return f"recovered: the run directory could not be written for {duration(down_s)}; training did not stop"
    if not lost and not downtime_s:
        return f"recovered at step {line['step']}: training did not stop"
    again = f"{lost} step{'s' * (lost != 1)} computed again" if lost else "nothing lost"
    return f"recovered at step {line['step']} after {downtime_s:.2f} s, {again}"


def _describe_link(line: Line) -> str | None:
    link = f"link {line['interface']} of node {line['node']} ({line['host']})"
    match line["state"]:
        case "down":
            return f"{link} is down: {line['detail']}"
        case "up":
            return f"{link} is up again after {line['down_s']:.2f} s"
        case "flapped":
            return f"{link} flapped: down for {line['down_s']:.2f} s at most"
    return None


def _describe_cadence(line: Line) -> str:
    every = line["every_steps"]
    if every >= NEVER_STEPS:
        return (
            f"tier {line['tier']} takes snapshots on their way to slower tiers alone: others would cost too much, or have no room"
        )
    often = "at every step" if every == 1 else f"every {every} steps"
    return f"snapshots of tier {line['tier']} are taken {often}: a worker that dies costs up to {every} step{'s' * (every > 1)}"


@dataclass
class Seen:
    """What the status line says."""

    step: int = 0
    loss: float | None = None
    tokens_per_s: float | None = None
    checkpoint: int | None = None
    faults: int = 0
    _generation: int = -1
    _pace: entries.Pace = field(default_factory=entries.Pace)

    @property
    def _step_s(self) -> float | None:
        return self._pace.step_s

    def metrics(self, line: Line) -> None:
        self.step = int(line.get("step", self.step))
        self.loss = line.get("loss")
        self.tokens_per_s = line.get("tokens_per_s")
        step_s = line.get("step_s")
        generation = int(line.get("generation", self._generation))
        if isinstance(step_s, float):
            self._pace = self._pace.after(step_s, line.get("steps", 1), first=generation > self._generation)
        self._generation = max(self._generation, generation)

    def left(self, target: int | None) -> str | None:
        return duration((target - self.step) * self._step_s) if self._step_s is not None and target is not None else None

    def text(self, target: int | None) -> str:
        parts = [
            f"loss {self.loss:.4f}" if self.loss is not None else None,
            f"{self.tokens_per_s:,.0f} tokens/s" if self.tokens_per_s else None,
            f"{self.left(target)} left" if self._step_s is not None and target is not None and self.step < target else None,
            f"{self._step_s:.2g} s a step" if self._step_s and target is None else None,
            f"checkpoint {self.checkpoint}" if self.checkpoint is not None else None,
            f"{self.faults} fault{'s' * (self.faults != 1)}" if self.faults else None,
        ]
        return "  ".join(part for part in parts if part)


class Display:
    """See the module.

    Args:
        mode: `live`, `plain`, `none`, or `auto`: live if `console` is a terminal, else plain.
        target: the last step; None: nobody knows it.
        log: has all that is shown, whatever `mode` is, and where nothing is shown any more.
        clock: seconds, any origin.
        seen: what is known already.
    """

    def __init__(
        self,
        mode: Literal["auto", "live", "plain", "none"],
        target: int | None,
        *,
        console: Console,
        log: DriverLog | None = None,
        clock: Callable[[], float] = time.monotonic,
        seen: Seen | None = None,
    ) -> None:
        self._mode = ("live" if console.is_terminal else "plain") if mode == "auto" else mode
        self._target = target
        self._console = console
        self.log = log or DriverLog()
        self._clock = clock
        self._began_t = clock()
        self._printed_t = clock() - PLAIN_EVERY_S
        self._prepared_t = clock() - PLAIN_EVERY_S
        self._seen = seen or Seen()
        self._trouble = ""
        self._live: tuple[Progress, TaskID] | None = None
        if self._mode == "live":
            progress = _bar(console)
            self._live = progress, progress.add_task("starting", total=target, status="")
            if self._seen.step:
                self._show_live(*self._live)
            progress.start()

    @property
    def live(self) -> bool:
        """Whether there is a line that moves."""
        return self._live is not None

    def note(self, text: str) -> None:
        """A sentence, with the time."""
        self.log.note(text)
        if self._mode != "none":
            self.print(f"{time.strftime('%H:%M:%S')} {text}")

    def print(self, text: str) -> None:
        """A line as it is, on the terminal alone."""
        self._console.print(Text(text), soft_wrap=True, highlight=False)

    def run_dir_trouble(self, text: str) -> None:
        """The run directory cannot be written: said once, and beside the steps until it can."""
        self._trouble = f"run directory not written since {time.strftime('%H:%M:%S')}"
        self.note(f"{text}: training goes on, and what is to be written there is kept in memory until it can be")

    def run_dir_well(self, text: str) -> None:
        """The run directory can be written again."""
        self._trouble = ""
        self.note(text)

    def waiting(self, text: str) -> None:
        """What the start of the job waits for, until the first step or a word of the preparation."""
        if self._clock() - self._prepared_t < PLAIN_EVERY_S:
            return  # the preparation says more
        if self._live is not None:
            progress, task = self._live
            progress.update(task, description=text, status="")
        if self._clock() - self._began_t >= PLAIN_EVERY_S and self._due():
            self._passing(text)

    def preparing(self, what: str, done: int, total: int) -> None:
        """The preparation has come so far."""
        self._prepared_t = self._clock()
        if self._live is not None:
            progress, task = self._live
            progress.update(task, description=what, completed=done, total=max(total, 1), status="")
        if self._due():
            self._passing(f"{what}: {done:,} of {total:,}" if total else what)

    def metrics(self, line: Line) -> None:
        """A step is finished."""
        self._seen.metrics(line)
        if self._live is not None:
            self._show_live(*self._live)
        if self._seen.step == self._target or self._due():
            self._pass_step()

    def _pass_step(self) -> None:
        of = f"/{self._target}" if self._target is not None else ""
        self._passing(f"step {self._seen.step}{of}  {self._status()}")

    def _passing(self, text: str) -> None:
        """What the line that moves says already, where there is one."""
        if self._live is None:
            self.note(text)
        else:
            self.log.note(text)

    def _show_live(self, progress: "Progress", task: "TaskID") -> None:
        progress.update(task, description="step", completed=self._seen.step, total=self._target, status=self._status())

    def _status(self) -> str:
        return "  ".join(part for part in (self._seen.text(self._target), self._trouble) if part)

    def event(self, line: Line) -> None:
        """A line of the ledger was written."""
        checkpoint = self._seen.checkpoint
        self.count(line)
        if self._seen.step == self._target == self._seen.checkpoint != checkpoint:
            self._pass_step()  # the step was told before it was saved
        text = describe(line)
        if text is not None:
            self.note(text)

    def count(self, line: Line) -> None:
        """The same without its sentence."""
        if line["event"] in ("committed", "script_checkpoint"):
            self._seen.checkpoint = int(line["step"])
        self._seen.faults += line["event"] == "fault"
        if self._live is not None and self._seen.step:
            self._show_live(*self._live)

    def refresh(self) -> None:
        """Draw the line that moves anew, where the terminal has taken it as it was before."""
        stream = self._console.file
        if self._live is not None and not (isinstance(stream, PatientStream) and (stream.gone or not stream.keeps_up())):
            self._live[0].refresh()

    def suspend(self) -> None:
        """The command is about to be stopped (Ctrl-Z): leave the terminal as others expect it."""
        if self._live is not None:
            self._console.show_cursor(True)
            stream = self._console.file
            if isinstance(stream, PatientStream):
                stream.drain(STOPPED_S)

    def go_on(self) -> None:
        """It was continued."""
        if self._live is not None:
            self._console.show_cursor(False)

    def _due(self) -> bool:
        if self._clock() - self._printed_t < PLAIN_EVERY_S:
            return False
        self._printed_t = self._clock()
        return True

    def close(self) -> None:
        """Leave the terminal as it should be."""
        if self._live is not None:
            self._live[0].stop()


def is_progress(text: str) -> bool:
    """Whether a line, without its time, says what the line that moves says."""
    return _PROGRESS.match(text) is not None


def _bar(console: Console) -> "Progress":
    """The live line; a job's output, which is no terminal, does without these imports."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[status]}", markup=False),
        console=console,
        auto_refresh=False,
    )
