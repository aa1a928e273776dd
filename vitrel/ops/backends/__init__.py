"""The backends beside `reference` and `sdpa`; vitrel.ops.dispatch says what a backend is, and lists all."""
