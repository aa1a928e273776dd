"""Opt-in acceleration on CPUs: evaluation of whole models, and linear layers in training.

`vitrel.optimize` changes a model in place, and `vitrel.cpu.optimize.restore` undoes it.
"""
