"""Loading of weights: vitrel's own files, and state dicts with timm's names.

`read` opens files, `unwrap` finds the state dict in them, `names` renames timm's tensors, `positions` resamples tables and
embeddings to a model's grid, and `load` raises an error for tensors that do not fit.
"""
