"""Opt-in acceleration of evaluation, and of linear layers in training, on CPUs.

`vitrel.optimize` changes a model in place, and `vitrel.cpu.optimize.restore` undoes it.
"""
