"""How position enters softmax(qk)v: two entries, several backends behind one signature."""

from vitrel.ops.dispatch import BACKENDS, attention, window_attention

__all__ = ["BACKENDS", "attention", "window_attention"]
