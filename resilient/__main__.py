"""`python -m resilient`, the same as the console script."""

from resilient.main import main

if __name__ == "__main__":
    main()
