"""``python -m turnwise``."""

from turnwise.cli.app import main

if __name__ == "__main__":
    main()
