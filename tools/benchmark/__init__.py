"""Models and attention measured beside their peers, on the machine at hand: what fills results/benchmark and results/kernels.

Nothing here is installed with the package: `python -m tools.benchmark` and `python -m tools.benchmark.kernels` run it.
"""
