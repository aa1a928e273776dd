"""`vitrel pack`, from a checkout."""

import sys

from vitrel.cli import main

if __name__ == "__main__":
    main(["pack", *sys.argv[1:]])
