"""Fewer experts a token: NAEE's dynamic skipping (Lu et al., 2024), or one number for all."""
