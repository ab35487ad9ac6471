"""Entry point of ``python -m train``."""

import sys

from train.cli.parser import main

if __name__ == "__main__":
    sys.exit(main())
