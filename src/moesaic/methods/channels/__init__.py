"""WINA and TEAL: at decoding a token reads the weights of its most important channels only."""
