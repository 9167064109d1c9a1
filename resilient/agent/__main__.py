"""`python -m resilient.agent`. Kept tiny: forked workers meet this module too."""

import sys

from resilient.agent.main import main

if __name__ == "__main__":
    sys.exit(main())
