"""Checkpoints: found by name, read tensor by tensor, written whole or not at all."""
