"""The page of a run directory beside what `resilient status --json` says of it."""

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

from resilient.report.command import FILE, write

ROOT = Path(__file__).parents[1]
AGES = {"checkpoint_age_s"}  # which go on between two commands


def written(run_dir: Path) -> str:
    """The page that a report leaves in a run directory."""
    write(run_dir, None)
    return (run_dir / FILE).read_text()


def drawn(page: str) -> ET.Element:
    """The page as a reader parses it."""
    return ET.fromstring(page.removeprefix("<!DOCTYPE html>"))


def figures(root: ET.Element) -> dict[str, tuple[Any, str]]:
    """Value and text by key of all that the page says is in the summary."""
    return {each.get("data-key", ""): (json.loads(each.get("value", "")), each.text or "") for each in root.iter("data")}


def looked_up(summary: Any, key: str) -> Any:
    """What the summary has there: names of members, numbers of elements, and of incidents their ids."""
    found = summary
    for word in key.split("."):
        if isinstance(found, list):
            found = found[int(word)] if word.isdigit() else next(each for each in found if each["fault_id"] == word)
        else:
            found = found[word]
    return found


def command(*words: str | Path) -> str:
    """What `resilient` prints."""
    done = subprocess.run([sys.executable, "-m", "resilient", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def agreed(run_dir: Path, page: Path) -> dict[str, tuple[Any, str]]:
    """Have the page written of a campaign that does not run, by the command; its figures, each as in `status --json`."""
    command("report", run_dir, "--output", page)
    summary = json.loads(command("status", "--json", run_dir))
    found = figures(drawn(page.read_text()))
    assert {key: value for key, (value, _) in found.items() if key not in AGES} == {
        key: looked_up(summary, key) for key in found if key not in AGES
    }
    return found
