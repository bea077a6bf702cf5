"""Observation of a model: the stream of its layers, and statistics of their activations."""
