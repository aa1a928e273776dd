"""Attention with position terms: `attention` and `window_attention`, computed by one of several backends, and `rotate`.

`reference` defines the result, `dispatch` chooses the backend of a call, `why` reports which backend served a call and why the
others did not.
"""

from vitrel.ops.dispatch import BACKENDS, attention, window_attention
from vitrel.ops.reference import rotate
from vitrel.ops.why import use_backend, why

__all__ = ["BACKENDS", "attention", "rotate", "use_backend", "why", "window_attention"]
