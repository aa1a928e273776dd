"""Models and attention measured beside their peers, on the machine at hand: what fills results/benchmark.

Nothing here is installed with the package: `python -m tools.benchmark` runs it.
"""
