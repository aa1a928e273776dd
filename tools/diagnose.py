"""`vitrel diagnose`, from a checkout."""

import sys

from vitrel.cli import main

if __name__ == "__main__":
    main(["diagnose", *sys.argv[1:]])
