"""How position enters softmax(qk)v: two entries, `attention` and `window_attention`, several backends behind one signature.

`reference` defines the result, `dispatch` chooses the backend, and `why` says which one served a call and why not another.
"""

from vitrel.ops.dispatch import BACKENDS, attention, window_attention
from vitrel.ops.why import use_backend, why

__all__ = ["BACKENDS", "attention", "use_backend", "why", "window_attention"]
