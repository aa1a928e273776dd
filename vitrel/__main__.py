"""Run the `vitrel` command by `python -m vitrel`."""

from vitrel.cli import main

if __name__ == "__main__":
    main()
