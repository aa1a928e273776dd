"""`python -m vitrel` is the `vitrel` command."""

from vitrel.cli import main

if __name__ == "__main__":
    main()
