"""Fewer experts a token: one number for all layers, or each layer's own (LExI)."""
