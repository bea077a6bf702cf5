"""Conversion of dense models into mixtures: MoRE, ToMoE, DSMoE, their layers and exports."""
