"""Random perturbation of coordinates in training: shift, jitter and rescale (DINOv3, arXiv 2508.10104).

The options have the names that they have in timm. ComRoPE (arXiv 2506.03737) perturbs the coordinates of RoPE and of absolute
embeddings too.

Every forward pass in training draws once from torch's generator, for the whole batch. Encodings of different layers draw
independently; an encoding shared by all layers (`share_position`) draws once. The unit is that of the encoding's coordinates:
patches, or in rope_normalized half a side of the grid. A rotary logit depends on differences of coordinates only, so with RoPE
`shift_coords` changes only pairs of a patch with a prefix token, whose coordinates stay in place.
"""

import math

import torch
from torch import Tensor

SMALLEST_STRENGTHS = {"shift_coords": 0, "jitter_coords": 1, "rescale_coords": 1}  # option: smallest valid value


def perturb(
    coordinates: Tensor,
    shift_coords: float | None = None,
    jitter_coords: float | None = None,
    rescale_coords: float | None = None,
) -> Tensor:
    """Return the coordinates shifted, stretched along each axis, then rescaled, by numbers drawn once per call, not per row.

    Args:
        coordinates: (y, x) [n, 2].
        shift_coords: each axis moves by its own uniform value in +-shift_coords; None: skip this step.
        jitter_coords: a number s; each axis is multiplied by its own log-uniform factor in 1/s..s; None: skip this step.
        rescale_coords: a number s; both axes are multiplied by one log-uniform factor in 1/s..s; None: skip this step.
    """

    def uniform(count: int, reach: float) -> Tensor:
        return (2 * torch.rand(count, dtype=torch.float32, device=coordinates.device) - 1) * reach

    if shift_coords is not None:
        coordinates = coordinates + uniform(2, shift_coords)
    if jitter_coords is not None:
        coordinates = coordinates * uniform(2, math.log(jitter_coords)).exp()
    if rescale_coords is not None:
        coordinates = coordinates * uniform(1, math.log(rescale_coords)).exp()
    return coordinates
