"""Text: read from files and data sets, tokenised, packed."""
