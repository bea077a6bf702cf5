"""Layer kinds, one file each: the plans by which a decoder layer is changed."""
