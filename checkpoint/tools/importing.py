"""`ckpt import`: a checkpoint from what others have trained.

Owns finding the packages that know how, through the entry-point group `resilient.importers`. Such an entry point is a function
`(source: Path, output: Path, *, config: Path | None) -> str`. It writes the first checkpoint of the run directory `output`,
and returns what it has written, in a few words. It raises CheckpointError where it cannot.
"""

from importlib.metadata import entry_points
from pathlib import Path

from checkpoint.tools.refusal import UNUSABLE, WRONG, Refusal

IMPORTERS = "resilient.importers"


def run(source: Path, form: str, output: Path, *, config: Path | None = None) -> str:
    """Import `source`. Raises Refusal, CheckpointError, OSError."""
    points = {point.name: point for point in entry_points(group=IMPORTERS)}
    if form in points:
        if not source.is_dir():
            raise Refusal(f"{source} {'is no directory' if source.exists() else 'is not there'}: SOURCE is what they have saved")
        return str(points[form].load()(source, output, config=config))
    if not points:
        raise Refusal(f"no installed package imports {form} (entry-point group {IMPORTERS}); install the one that trains", UNUSABLE)
    raise Refusal(f"there is no format {form}; there are {', '.join(sorted(points))}", WRONG)
