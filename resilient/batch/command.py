"""`resilient doctor JOB.sh`: reads a batch script, and names its traps."""

import json
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

SIZE_BYTES = 1 << 20
SUFFIXES = (".sh", ".bash", ".sbatch", ".slurm", ".job")
BASH_S = 10.0


def is_script(path: Path) -> bool:
    """Whether a file is a script rather than a config: by its name, or by its first two characters."""
    if path.suffix in SUFFIXES:
        return True
    try:
        with path.open("rb") as file:
            return file.read(2) == b"#!"
    except OSError:
        return False


def examine(path: Path) -> list[Finding]:
    """The traps of a script, by line. Raises EnvironmentUnusable if it cannot be read."""
    try:
        with path.open("rb") as file:
            data = file.read(SIZE_BYTES + 1)
    except OSError as error:
        raise EnvironmentUnusable(f"{path} cannot be read: {error.strerror}") from None
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
    console = Console(highlight=False)
    if as_json:
        text = json.dumps({"ok": not findings, "findings": [asdict(finding) for finding in findings]}, indent=1)
        console.print(text, soft_wrap=True, markup=False)
        return
    for finding in findings:
        console.print(
            Text.assemble((f"{path}:{finding.line}: ", "bold"), (finding.trap, "bold red"), f": {finding.found}"), soft_wrap=True
        )
        console.print(Text(f"    why:   {finding.why}"), soft_wrap=True)
        console.print(Text(f"    write: {finding.write}"), soft_wrap=True)
    count = len(findings)
    console.print(
        f"{count} trap{'s' * (count != 1)} in {path}" if count else f"no trap is known in {path}", soft_wrap=True, markup=False
    )
