"""`vitrel plot`, from a checkout."""

import sys

from vitrel.cli import main

if __name__ == "__main__":
    main(["plot", *sys.argv[1:]])
