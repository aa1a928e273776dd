"""`vitrel evaluate`, from a checkout."""

import sys

from vitrel.cli import main

if __name__ == "__main__":
    main(["evaluate", *sys.argv[1:]])
