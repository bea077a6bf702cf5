"""``python -m moesaic``: the command line."""

from moesaic.cli import main

if __name__ == "__main__":
    main()
