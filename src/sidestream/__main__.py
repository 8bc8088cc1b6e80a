"""`python -m sidestream` runs the command `sidestream`."""

from sidestream.cli import main

if __name__ == "__main__":
    main()
