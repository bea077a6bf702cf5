"""Architectures: where each keeps its parts, and how its routers decide."""
