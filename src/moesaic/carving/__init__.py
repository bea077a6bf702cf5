"""Dense models into mixtures: MoRE, ToMoE and DSMoE, with their layers, modules and exports."""
