"""`python -m sidestream` is `sidestream`."""

from sidestream.cli import main

if __name__ == "__main__":
    main()
