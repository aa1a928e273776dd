"""`vitrel compare`, from a checkout."""

import sys

from vitrel.cli import main

if __name__ == "__main__":
    main(["compare", *sys.argv[1:]])
