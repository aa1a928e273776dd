"""Random perturbation of coordinates in training: shift, jitter and rescale (DINOv3, arXiv 2508.10104).

The options have the names of DINOv3's code and timm's (`shift_coords`, ...); `shift` here moves coordinates, not windows.
ComRoPE (arXiv 2506.03737) perturbs the coordinates of RoPE and of absolute embeddings too.

Every forward pass in training draws once from torch's generator, for the whole batch. Encodings of different layers draw
independently; an encoding shared by all layers (`share_position`) draws once. The unit is that of the encoding's coordinates:
patches, or in rope_normalised half a side of the grid. A rotary logit depends on differences of coordinates only, so with RoPE
`shift` changes only pairs of a patch with a prefix token, whose coordinates stay in place.
"""

import math

import torch
from torch import Tensor

STRENGTHS = {"shift": 0, "jitter": 1, "rescale": 1}  # option: smallest valid value


def perturb(
    coordinates: Tensor, shift: float | None = None, jitter: float | None = None, rescale: float | None = None
) -> Tensor:
    """Return coordinates (y, x) [n, 2] shifted, then stretched per axis, then rescaled; one draw for all n, in float32.

    shift: both axes move by a uniform value in +-shift. jitter: each axis is multiplied by a log-uniform factor in
    1/jitter..jitter. rescale: both axes are multiplied by one log-uniform factor in 1/rescale..rescale. None: skip the step.
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
