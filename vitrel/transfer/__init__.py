"""Resolution transfer: a trained model at any size, what had to be resized for it, and what became of its accuracy.

checkpoint -> evaluate (rows) -> report (tables), verdict (sentences), plots; sweep does all of it in one folder, comparison
reads the configuration of `tools/compare.py`.
"""
