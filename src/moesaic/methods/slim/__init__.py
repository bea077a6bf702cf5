"""Slimming: experts, or dense FFNs, made narrower neuron by neuron."""
