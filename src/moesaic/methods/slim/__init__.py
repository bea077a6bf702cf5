"""Slimming: removes neurons from experts, or from dense FFNs."""
