"""``python -m moesaic.cli``, for torchrun and accelerate."""

from moesaic.cli import main

if __name__ == "__main__":
    main()
