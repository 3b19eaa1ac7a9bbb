"""`python -m advantage_probe`: the command line."""

from .analyses.cli import main

if __name__ == "__main__":
    main()
