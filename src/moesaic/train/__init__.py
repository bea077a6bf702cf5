"""Training: the one loop, what it minimises, its text, and the verb ``tune``."""
