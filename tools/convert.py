"""`vitrel convert`, from a checkout."""

import sys

from vitrel.cli import main

if __name__ == "__main__":
    main(["convert", *sys.argv[1:]])
