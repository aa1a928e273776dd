"""Every other way to compute what vitrel.ops.reference defines; each serves a call, or refuses it with a reason.

A backend is a module with `refuses(call) -> reason or ""`, `pays(call) -> bool`, whether "auto" takes it where it serves, and
the two functions of vitrel.ops without their argument `backend`, or the one that it serves: `refuses` then says no to all calls
of the other. vitrel.ops.dispatch lists them.
"""
