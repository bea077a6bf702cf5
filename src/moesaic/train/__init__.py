"""Training: the single loop, its objectives, its text, and the verb ``tune``."""
