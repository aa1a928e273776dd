"""Opt-in acceleration of evaluation, and of linear layers in training, on CPUs: `vitrel.optimize`."""
