"""Helpers for tests of encodings: every key with its options, random parameters, attention on given q, k and v."""

import inspect

import pytest
import timm
import torch
from torch import nn

import oracles
from vitrel import POSITIONS, create_position
from vitrel.grid import Grid
from vitrel.ops import BACKENDS, attention
from vitrel.ops.reference import Call

KEYS = list(POSITIONS)
GENERAL = ("sdpa", "reference")  # backends that support nearly everything; the rest have separate tests
IN_ATTENTION = [key for key, encoding in POSITIONS.items() if encoding.site == "attention"]
SMALL = {"pape": {"parabolas": 3}, "cpb": {"hidden": 6}, "fourier": {"bands": 4}}  # options of every test of these keys
# One encoding per way to enter attention, for tests of windows: biases by offset, by axis and computed, tables multiplied by
# queries, by keys and by the weights of values, a bias of queries, rotations of both and of each.
WAYS = ["table", "factorized", "cpb", "decomposed", "deberta", "shaw", "transformer_xl", "rope_mixed", "xpos"]
MODELS = [f"vitrel_vit_n8_{key}" for key in (*KEYS, "absolute_rope_mixed")]
MODELS += [f"vitrel_swin_n_{key}" for key in (*WAYS, "absolute_rope_mixed")] + ["vitrel_swin_n", "vitrel_swinv2_n"]
VARIANTS = [(key, {}) for key in KEYS] + [
    ("absolute_windowed", {"period": 2}),
    ("absolute_windowed", {"period": (1, 3)}),
    ("fourier", {"base": 20.0}),
    ("table", {"per_head": False}),
    ("clipped", {"radius": 1}),
    ("clipped", {"radius": (0, 2), "per_head": False}),
    ("t5", {"mode": "sum"}),
    ("t5", {"num_buckets": 8, "max_distance": 4}),
    ("t5", {"num_buckets": (1, 2)}),
    ("t5", {"bidirectional": False}),
    ("cpb", {"policy": "renormalize"}),
    ("cpb", {"pretrained_window": (2, 6)}),
    ("alibi", {"distance": "l1"}),
    ("alibi", {"distance": "squared"}),
    ("alibi", {"learnable": True, "directional": True}),
    ("alibi", {"policy": "renormalize"}),
    ("log_decay", {"decay": 0.3}),
    ("log_decay", {"distance": "l1", "directional": True}),
    ("log_decay", {"policy": "renormalize"}),
    ("shaw", {"per_head": True}),
    ("shaw", {"values": False, "radius": 1}),
    ("deberta", {"radius": (1, 3)}),
    ("rope_axial", {"reference": (2, 5), "base": 20.0}),
    ("rope_axial", {"policy": "linear"}),
    ("rope_axial", {"policy": "ntk"}),
    ("rope_axial", {"policy": "yarn"}),
    ("rope_mixed", {"policy": "linear"}),
    ("rope_mixed", {"policy": "ntk"}),
    ("rope_mixed", {"policy": "yarn"}),
    ("xpos", {"gamma": 1.0, "scale_base": 2.0}),
    ("lookhere", {"fov": 180, "slope": 0.5}),
    ("lookhere", {"fov": 45}),
]
VARIANT_IDS = ["-".join([key, *(f"{name}={value}" for name, value in options.items())]) for key, options in VARIANTS]


def spread(cases, others) -> list:
    """Return pytest parameters (key, options, other): without options, all of `others`; with options, every second."""
    return [
        pytest.param(key, options, other, id=f"{key}-{options or ''}-{other}")
        for i, (key, options) in enumerate(cases)
        for j, other in enumerate(others)
        if not options or (i + j) % 2 == 0
    ]


def make(key: str, grid, heads: int = 2, dim: int = 8, **options) -> nn.Module:
    """Build an encoding with small hidden sizes."""
    dtype = options.pop("dtype", None)
    return create_position(key, grid, heads, dim, dtype=dtype, **SMALL.get(key, {}), **options)


def perturbed(module: nn.Module, std: float = 0.5) -> nn.Module:
    """Add noise to all parameters in place, since a table of zeros would hide wrong signs and indices."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * std)
    return module


def small_model(name: str, **keywords) -> nn.Module:
    """Build a small model in evaluation mode with noise on its parameters."""
    return perturbed(timm.create_model(name, **({"num_classes": 5} | keywords)).eval(), 0.2)


def call(terms, grid, **how) -> Call:
    """Return a call of attention with the terms on a grid: float32 on the CPU, without gradients."""
    grid = Grid(*grid)
    plain = dict(terms=terms, grid=grid, heads=2, width=8, queries=grid.tokens)
    return Call(**plain | dict(dtype=torch.float32, device=torch.device("cpu"), grad=False) | how)


def refusal(backend: str, terms, grid, heads: int = 2, width: int = 8, **how) -> str:
    """Return why a backend refuses the terms on a grid in training, "" if it supports them."""
    how = {"heads": heads, "width": width, "dtype": torch.float64, "grad": True} | how
    return BACKENDS[backend].refuses(call(terms, grid, **how))


def serving(terms, grid, heads: int = 2, width: int = 8, **how) -> list[str]:
    """Return the backends that support the terms on a grid in training."""
    return [name for name in BACKENDS if not refusal(name, terms, grid, heads, width, **how)]


def attend(encoding, q, k, v, grid, backend="reference"):
    """Return attention of q, k, v [B, H, N, D] with an encoding; rows added to tokens are added to q, k and v."""
    terms = encoding(grid)
    if reason := refusal(backend, terms, grid, *q.shape[1::2]):
        pytest.skip(f"{backend} refuses these terms, as it says: {reason}")
    if terms.tokens is not None:
        tokens = terms.tokens.unflatten(-1, (q.shape[1], -1)).transpose(0, 1).to(q.dtype)  # [H, N, D]
        q, k, v = q + tokens, k + tokens, v + tokens
    return attention(q, k, v, terms, grid, backend=backend)


def qkv(grid, heads=2, dim=8, dtype=torch.float64):
    return torch.randn(3, 2, heads, grid.tokens, dim, dtype=dtype)


def oracle_output(key, encoding, q, k, v, grid, trained, options):
    """Return the output [H, N, D] of the encoding's oracle for q, k, v [H, N, D], with the parameters of `encoding`."""
    return _oracle(key, encoding, q, k, v, grid, trained, options)[1]


def oracle_logits(key, encoding, q, k, grid, trained, options):
    """Return the logits [H, N, N] of the encoding's oracle, as `oracle_output`."""
    return _oracle(key, encoding, q, k, k, grid, trained, options)[0]


def _oracle(key, encoding, q, k, v, grid, trained, options):
    oracle = oracles.ORACLES[key]
    arguments = {name: p.detach().numpy() for name, p in encoding.named_parameters()} | SMALL.get(key, {}) | options
    if "trained" in inspect.signature(oracle).parameters:
        arguments["trained"] = tuple(trained[:2])
    return oracle(*(t.numpy() for t in (q, k, v)), *grid, **arguments)


def tensors(terms) -> list[torch.Tensor]:
    """Return every tensor in the terms."""
    result = []
    for item in terms:
        if isinstance(item, torch.Tensor):
            result.append(item)
        elif isinstance(item, tuple):
            result += tensors(item)
    return result
