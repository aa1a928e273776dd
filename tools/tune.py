"""`vitrel tune`, from a checkout."""

import sys

from vitrel.cli import main

if __name__ == "__main__":
    main(["tune", *sys.argv[1:]])
