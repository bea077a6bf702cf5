"""CD-MoE: some mixture layers become small dense layers (Cao et al., 2025)."""
