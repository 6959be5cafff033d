"""The command ``inferencegym``, also as ``python -m inferencegym``."""

import sys

from cli.main import main

if __name__ == "__main__":
    sys.exit(main())
