"""`vitrel doctor`, from a checkout."""

import sys

from vitrel.cli import main

if __name__ == "__main__":
    main(["doctor", *sys.argv[1:]])
