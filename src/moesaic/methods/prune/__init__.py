"""NAEE: expert pruning (Lu et al., 2024), and the criteria it is compared with."""
