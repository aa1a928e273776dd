"""Resolution transfer: a trained model at any size, what had to be resized for it, and what became of its accuracy.

`evaluate` does it in one call. checkpoint, foreign_models -> plan -> rows (measure) -> report (tables), verdict (sentences),
plots, html; sweep does all of it in one folder, comparison reads the configuration of `tools/compare.py`.
"""

from vitrel.evaluate.notebook import evaluate

__all__ = ["evaluate"]
