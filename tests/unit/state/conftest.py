"""The snapshot daemon of these tests is that of the checkpoints' tests."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "checkpoint"))
