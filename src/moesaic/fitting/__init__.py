"""Search for the result of least KL within a budget: candidates, their sizes, a price table."""
