"""`vitrel report`, from a checkout."""

import sys

from vitrel.cli import main

if __name__ == "__main__":
    main(["report", *sys.argv[1:]])
