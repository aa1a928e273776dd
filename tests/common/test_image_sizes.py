from itertools import product
from math import ceil, log, sqrt

import pytest

from helpers import each
from vitrel.common.sizes import format_size, native_size, parse_size


@each(("text", "size"), [("96", (96, 96)), (96, (96, 96)), ("160x224", (160, 224)), ("32X48", (32, 48))])
def test_sizes_are_read_height_first(text, size):
    assert parse_size(text) == size
    assert parse_size(format_size(size)) == size


@each("text", ["", "0", "96x", "x96", "-96", "96x96x3", "96*128", "1e2", "9.5", True, "²"])
def test_bad_sizes_are_named_with_a_valid_example(text):
    with pytest.raises(ValueError, match="is not an image size: write pixels as 96, or height x width as 160x224") as caught:
        parse_size(text)
    assert repr(text) in str(caught.value)


def sides_changed(grid, exact):
    return sum(abs(log(side / real)) for side, real in zip(grid, exact, strict=True))


@each("patch", [(16, 16), (8, 14)])
def test_native_size_is_the_grid_nearest_to_the_exact_sides(patch):
    """Against an enumeration of all grids of the budget with both sides less than one patch from the exact ones."""
    for height, width, budget in product((1, 37, 224, 300, 511), (2, 37, 224, 341, 500), (1, 16, 49, 196, 210)):
        ratio = (height / patch[0]) / (width / patch[1])
        exact = sqrt(budget * ratio), sqrt(budget / ratio)
        h, w = (side // step for side, step in zip(native_size(height, width, budget, patch), patch, strict=True))
        assert h >= 1 and w >= 1 and h * w <= budget
        if min(exact) < 1:
            assert (h, w) == ((budget, 1) if ratio > 1 else (1, budget))
            continue
        sides = (range(max(1, int(side)), ceil(side) + 1) for side in exact)
        near = [(a, b) for a, b in product(*sides) if a * b <= budget]
        assert (h, w) in near
        assert sides_changed((h, w), exact) == pytest.approx(min(sides_changed(grid, exact) for grid in near))


@each("budget", [1, 49, 196, 210, 576, 600])
def test_native_size_of_a_square_is_square_and_turns_with_the_image(budget):
    h, w = native_size(300, 300, budget, (16, 16))
    assert h == w == 16 * int(sqrt(budget))
    assert native_size(256, 385, budget, (16, 16)) == native_size(385, 256, budget, (16, 16))[::-1]


def test_native_size_of_no_token_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        native_size(224, 224, 0, (16, 16))
