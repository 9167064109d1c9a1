"""`resilient doctor JOB.sh`: reads a batch script, and names its traps."""

import errno
import os
import stat
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.text import Text

from resilient.batch.job import read
from resilient.batch.shell import NestedTooDeep
from resilient.batch.traps import Finding, traps
from resilient.exits import EnvironmentUnusable
from resilient.json_output import print_json

SIZE_BYTES = 1 << 20
SUFFIXES = (".sh", ".bash", ".sbatch", ".slurm", ".job")
BASH_S = 10.0


def script_in(path: Path) -> bytes | None:
    """What is in a batch script; None where the file is none, by its name and its first two characters, but may be a config.

    It is read once, a pipe to its end. Raises EnvironmentUnusable where what has the name of a script cannot be read.
    """
    named = path.suffix in SUFFIXES
    try:
        data = _read(path)
    except OSError as error:
        if not named:
            return None
        raise EnvironmentUnusable(f"{path} cannot be read: {error.strerror}") from None
    return data if named or data.startswith(b"#!") else None


def _read(path: Path) -> bytes:
    """A file, but no more than is too much for a script. Raises OSError, also for a device, and a pipe that nobody writes to."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK | os.O_NOCTTY)) as file:
        mode = os.fstat(file.fileno()).st_mode
        if stat.S_ISREG(mode):
            return file.read(SIZE_BYTES + 1)
        if not stat.S_ISFIFO(mode):
            raise OSError(errno.EINVAL, "it is neither a file nor a pipe")
        begun = _begun(file.fileno())
        os.set_blocking(file.fileno(), True)
        return begun + file.read(SIZE_BYTES + 1 - len(begun))


def _begun(fd: int) -> bytes:
    """What is in a pipe by now, which is nothing where somebody has not written yet."""
    try:
        data = os.read(fd, SIZE_BYTES)
    except BlockingIOError:
        return b""
    if not data:
        raise OSError(errno.EPIPE, "it is a pipe that nobody writes to")
    return data


def examine(path: Path, data: bytes) -> list[Finding]:
    """The traps of a script, by line. Raises EnvironmentUnusable if it is none.

    Args:
        data: what `script_in` has read.
    """
    if len(data) > SIZE_BYTES:
        raise EnvironmentUnusable(f"{path} is no batch script: it has more than {SIZE_BYTES >> 20} MiB")
    text = data.decode(errors="replace")
    found: list[Finding] = []
    if "\r\n" in text:
        line = text[: text.index("\r\n")].count("\n") + 1
        found.append(Finding(line, "line ends", "lines end as on Windows", "sbatch refuses the script", "sed -i 's/\\r$//' FILE"))
        text = text.replace("\r\n", "\n")
    try:
        job = read(text)
    except NestedTooDeep as error:
        raise EnvironmentUnusable(f"{path} cannot be read: {error}") from None
    found += _syntax(text) if not job.script.unclosed else []
    return sorted([*found, *traps(job)], key=lambda finding: finding.line)


def _syntax(text: str) -> list[Finding]:
    """What bash says of it without running it; nothing where there is no bash."""
    try:
        done = subprocess.run(
            ["bash", "--norc", "--noprofile", "-n", "/dev/stdin"],
            input=text.encode(),
            capture_output=True,
            timeout=BASH_S,
            check=False,
            env={"LC_ALL": "C", "PATH": "/usr/bin:/bin"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    for line in done.stderr.decode(errors="replace").splitlines():
        _, there, rest = line.partition(": line ")
        number, colon, said = rest.partition(": ")
        if there and colon and number.isdigit():  # what follows the first error follows from it
            why = "bash stops there: what is above is run, nothing of what is below"
            return [Finding(int(number), "syntax", said, why, "mend the line, and try `bash -n FILE`")]
    return []


def show(path: Path, findings: Sequence[Finding], *, as_json: bool) -> None:
    """Print them."""
    if as_json:
        print_json({"ok": not findings, "findings": [asdict(finding) for finding in findings]})
        return
    console = Console(highlight=False, markup=False, emoji=False)
    for finding in findings:
        console.print(
            Text.assemble((f"{path}:{finding.line}: ", "bold"), (finding.trap, "bold red"), f": {finding.found}"), soft_wrap=True
        )
        console.print(Text(f"    why:   {finding.why}"), soft_wrap=True)
        console.print(Text(f"    write: {finding.write}"), soft_wrap=True)
    count = len(findings)
    console.print(f"{count} trap{'s' * (count != 1)} in {path}" if count else f"no trap is known in {path}", soft_wrap=True)
