"""Terms of a crop: its tokens have the logits, outputs and gradients they have in the whole, whatever the encoding reads."""

import pytest
import torch

from helpers import each
from helpers.variants import WAYS, make, perturbed, qkv, tensors
from vitrel.grid import Grid
from vitrel.inputs.crop import Crop, crop_terms
from vitrel.ops.reference import attention, masked_logits
from vitrel.position import Terms
from vitrel.position.terms import Table

MORE = ["absolute", "rope_normalized", "lookhere", "pape", "fire", "absolute+rope_mixed", "sincos+decomposed"]
CASES = [(key, {}) for key in (*WAYS, *MORE)] + [(key, {"temperature": "log_n"}) for key in ("table", "rope_mixed")]


def members(crop: Crop) -> torch.Tensor:
    """Index of the crop's tokens, counted out."""
    whole, (y0, x0) = crop.whole, crop.origin
    inside = [whole.prefix + y * whole.w + x for y in range(y0, y0 + crop.h) for x in range(x0, x0 + crop.w)]
    return torch.tensor([*range(whole.prefix), *inside])


def add_tokens(x, terms):
    return x if terms.tokens is None else x + terms.tokens.unflatten(-1, (x.shape[1], -1)).transpose(0, 1)


def check(encoding, crop: Crop) -> None:
    whole, at = crop.whole, members(crop)
    visible = torch.zeros(whole.tokens, dtype=torch.bool).index_fill(0, at, True)
    q, k, v = qkv(whole)
    weight = torch.randn(*v.shape[:2], len(at), v.shape[-1], dtype=v.dtype)
    parameters = [p for p in encoding.parameters() if p.requires_grad]

    terms = encoding(whole)
    a, b, c = (add_tokens(x, terms) for x in (q, k, v))
    logits = masked_logits(a, b, terms, whole)[..., at, :][..., at]
    # Only inside the crop: a query that sees nothing there (LookHere's corner) is fully masked in both.
    out = attention(a, b, c, terms, whole, visible.expand(whole.tokens, -1))[:, :, at]

    terms = crop_terms(encoding(whole), crop)
    a, b, c = (add_tokens(x[:, :, at], terms) for x in (q, k, v))
    torch.testing.assert_close(masked_logits(a, b, terms, crop.grid), logits, atol=1e-10, rtol=1e-10)
    cropped = attention(a, b, c, terms, crop.grid)
    torch.testing.assert_close(cropped, out, atol=1e-10, rtol=1e-10)
    if parameters:
        wanted, found = (torch.autograd.grad((x * weight).sum(), parameters, allow_unused=True) for x in (out, cropped))
        for w, f in zip(wanted, found, strict=True):
            assert (w is None) == (f is None)
            if w is not None:
                torch.testing.assert_close(f, w, atol=1e-10, rtol=1e-10)


@each(("prefix", "key", "options"), [(n % 2 * 2, *case) for n, case in enumerate(CASES)])
def test_logits_of_the_whole(prefix, key, options):
    encoding = perturbed(make(key, Grid(4, 5, prefix), dtype=torch.float64, **options)).eval()
    whole = Grid(6, 7, prefix)
    for crop in (Crop(whole, (1, 3), 4, 2), Crop(whole, (5, 0), 1, 7)):
        check(encoding, crop)


def test_what_is_no_row_of_a_token_stays():
    encoding = perturbed(make("transformer_xl", Grid(4, 5), temperature="log_n"))
    whole = encoding(Grid(6, 7))
    terms = crop_terms(whole, Crop(Grid(6, 7), (1, 1), 2, 3))
    assert terms.temperature is whole.temperature and terms.query_bias is whole.query_bias
    assert crop_terms(Terms(), Crop(Grid(6, 7), (1, 1), 2, 3)) == Terms()


def test_the_crop_on_its_own_is_another():
    """The control: the encoding on the crop's grid, as if it were an image, has other logits where the size matters."""
    whole, crop = Grid(6, 7), Crop(Grid(6, 7), (1, 3), 4, 2)
    for key, options in (("rope_normalized", {}), ("fire", {}), ("table", {"policy": "bicubic"}), ("absolute", {})):
        encoding = perturbed(make(key, Grid(4, 5), **options)).eval()
        for of_whole, own in zip(tensors(crop_terms(encoding(whole), crop)), tensors(encoding(crop.grid)), strict=True):
            assert of_whole.shape == own.shape and (of_whole - own).abs().max() > 1e-3, key


@pytest.mark.slow
def test_one_graph_for_every_crop():
    encoding = perturbed(make("table", Grid(4, 5, 1)))

    def cropped(h: int, w: int, y: int, x: int) -> torch.Tensor:
        whole = Grid(h, w, 1)
        return crop_terms(encoding(whole), Crop(whole, (y, x), h - y, w - x)).tables[0].bias

    compiled = torch.compile(cropped, fullgraph=True, dynamic=True, backend="eager")
    for h, w, y, x in ((6, 7, 2, 3), (9, 5, 3, 2), (8, 8, 4, 5)):
        torch.testing.assert_close(compiled(h, w, y, x), cropped(h, w, y, x))


@each(("origin", "h", "w"), [((3, 0), 4, 2), ((0, 6), 2, 2), ((-1, 0), 2, 2), ((0, 0), 0, 2)])
def test_a_crop_outside(origin, h, w):
    with pytest.raises(ValueError, match=rf"a crop of {h}x{w} tokens at row .* is not inside the 6x7 grid: origin counts"):
        crop_terms(Terms(), Crop(Grid(6, 7), origin, h, w))


@each(
    ("terms", "message"),
    [
        (
            Terms(tokens=torch.zeros(30, 4)),
            "tokens has 30 rows, but the 6x7 grid with prefix=1 needs 43; pass the terms of",
        ),
        (Terms(rotary=(torch.zeros(1, 42, 2),) * 2), "rotary has 42 rows, .* needs 43"),
        (Terms(tables=(Table("h", bias=torch.zeros(2, 11)),)), "table over 'h' has 11 rows, .* needs 14"),
        (Terms(tables=(Table(gated=(torch.zeros(1, 3, 4), torch.zeros(1, 143, 3))),)), "table over 'hw' has 143 rows, .* 146"),
    ],
)
def test_terms_of_another_grid(terms, message):
    with pytest.raises(ValueError, match=message):
        crop_terms(terms, Crop(Grid(6, 7, 1), (1, 1), 2, 2))
