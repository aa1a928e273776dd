"""Opt-in acceleration on CPUs: `vitrel.optimize` replaces linear layers of a model, `vitrel.cpu.optimize.restore` undoes it."""
