"""`vitrel train`, from a checkout."""

import sys

from vitrel.cli import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
