"""How position enters softmax(qk)v: two entries, several backends behind one signature."""

from vitrel.ops.dispatch import BACKENDS, attention, window_attention
from vitrel.ops.why import use_backend, why

__all__ = ["BACKENDS", "attention", "use_backend", "why", "window_attention"]
