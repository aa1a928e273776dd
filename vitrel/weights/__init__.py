"""Weights of other code bases: their layouts (`vit_names`, `swin_names`), the place of position, and the loader."""
