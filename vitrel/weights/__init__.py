"""Loading and saving of weights, our own and those of other code bases.

`vit_names` and `swin_names` know the layouts, `place` brings tables and embeddings to a model's grid, and `load` refuses what
is left over.
"""
