"""Coordinates perturbed in training: shift, jitter and rescale of DINOv3 (arXiv 2508.10104), which keep the names of its code
and timm's (`shift_coords`, ...): here `shift` moves coordinates, no windows. ComRoPE (arXiv 2506.03737) perturbs those of RoPE
and of absolute embeddings too.

Each forward in training draws once from torch's generator, for the whole batch: layers with an encoding each draw apart, one
for all (`share_position`) draws once. The unit is the encoding's: patches, or half of the grid in rope_normalised. A rotation
sees differences alone: there `shift` acts between the prefix tokens, which stay where they are, and all others.
"""

import math

import torch
from torch import Tensor

STRENGTHS = {"shift": 0, "jitter": 1, "rescale": 1}  # the options, and what each has to be at least


def perturb(
    coordinates: Tensor, shift: float | None = None, jitter: float | None = None, rescale: float | None = None
) -> Tensor:
    """Coordinates (y, x) [n, 2] shifted (uniform in +-shift), stretched per axis (log-uniform in 1/jitter..jitter) and rescaled
    together (1/rescale..rescale), in this order; one draw for all n, in float32. None draws nothing.
    """

    def uniform(count: int, reach: float) -> Tensor:
        return (2 * torch.rand(count, dtype=torch.float32, device=coordinates.device) - 1) * reach

    if shift is not None:
        coordinates = coordinates + uniform(2, shift)
    if jitter is not None:
        coordinates = coordinates * uniform(2, math.log(jitter)).exp()
    if rescale is not None:
        coordinates = coordinates * uniform(1, math.log(rescale)).exp()
    return coordinates
