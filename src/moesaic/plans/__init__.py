"""Layer kinds: one file for each thing that a decoder layer can become."""
