"""Loading of weights: vitrel's own files, and state dicts with timm's names.

`vit_names` and `swin_names` rename timm's tensors, `positions` resamples tables and embeddings to a model's grid, and `load`
raises an error for tensors that do not fit.
"""
