"""Modules that plans put into a model."""
