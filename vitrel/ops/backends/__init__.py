"""Alternative implementations of what vitrel.ops.reference defines; each serves a call or refuses it with a reason.

A backend is a module with `refuses(call)`, which returns the reason or "", with `pays(call)`, which is True where "auto" should
use it, and with `attention` and `window_attention` as in vitrel.ops, without their argument `backend`. It may have only one of
the two; `refuses` then gives a reason for every call of the other. vitrel.ops.dispatch lists the backends. The module `tune`
checks and times them.
"""
