"""The result that loses least within a budget: candidates, their sizes, and a search."""
