"""Loading of weights: vitrel's own files and those of other code bases.

`vit_names` and `swin_names` rename other layouts, `positions` resamples tables and embeddings to a model's grid, and `load`
raises an error for tensors that do not fit.
"""
