"""Fewer experts a token: one number for all layers."""
