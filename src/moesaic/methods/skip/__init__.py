"""Skipping: NAEE's dynamic skipping of experts (Lu et al., 2024), or a lower top-k."""
