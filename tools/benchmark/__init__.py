"""Benchmarks of models and attention against other libraries on this machine, written to results/benchmark.

Run by `python -m tools.benchmark`; not installed with the package.
"""
