"""`python -m chaos`: as `resilient chaos`, also where the package is not installed."""

import sys

from chaos.cli import app
from resilient.main import guarded

sys.exit(guarded(app))
