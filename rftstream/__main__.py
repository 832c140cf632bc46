"""`python -m rftstream`."""

from rftstream.cli import main

if __name__ == "__main__":
    main()
