"""Quality, routing, speed and memory, measured."""
