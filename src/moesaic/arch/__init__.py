"""Architectures: the paths of their parts, and the decisions of their routers."""
