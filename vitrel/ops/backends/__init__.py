"""Alternative implementations of what vitrel.ops.reference defines.

A backend is a module with `attention` or `window_attention` as in vitrel.ops, or both, without their argument `backend`, and
`refuses(call)`, the reason why it does not serve a call. vitrel.ops.dispatch lists the backends, and vitrel.ops.auto has the
table of what "auto" takes.
"""
