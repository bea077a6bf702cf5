"""``python -m moesaic``: the command line, for torchrun and accelerate too."""

from moesaic.cli import main

if __name__ == "__main__":
    main()
