"""`vitrel export`, from a checkout."""

import sys

from vitrel.cli import main

if __name__ == "__main__":
    main(["export", *sys.argv[1:]])
