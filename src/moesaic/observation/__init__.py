"""A model seen layer by layer: the stream of its layers, and statistics of what passes."""
