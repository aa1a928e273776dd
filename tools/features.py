"""`vitrel features`, from a checkout."""

import sys

from vitrel.cli import main

if __name__ == "__main__":
    main(["features", *sys.argv[1:]])
