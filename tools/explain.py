"""`vitrel explain`, from a checkout."""

import sys

from vitrel.cli import main

if __name__ == "__main__":
    main(["explain", *sys.argv[1:]])
