"""How fast the backends of vitrel.ops are beside their peers, on the machine at hand: `tools/measure_kernels.py` runs it."""
