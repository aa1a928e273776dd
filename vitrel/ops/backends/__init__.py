"""Alternative implementations of what vitrel.ops.reference defines.

A backend is a module with `attention` or `window_attention` as in vitrel.ops, or both, without their argument `backend`.
vitrel.ops.dispatch lists the backends, and the table of vitrel.ops.capability says which calls each of them serves.
"""
