"""How far attention spreads as a sequence grows, when position alone decides: entropy, and the number of keys above 1 %."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from matplotlib.figure import Figure

from vitrel.grid import Grid
from vitrel.inspect.any_model import built_encoding, encoding_name, evaluated
from vitrel.inspect.plot.common import head_name, line_style, sheet
from vitrel.inspect.plot.offsets import zero_query_bias
from vitrel.position import PositionEncoding

LENGTHS = (64, 128, 256, 512, 1024, 2048)
SHARE = 0.01  # weight above which a key counts


class Span(NamedTuple):
    """Attention of the last query of a sequence, one value per head."""

    length: int  # N
    entropy: tuple[float, ...]  # in nats; log N for uniform attention
    above: tuple[int, ...]  # number of keys with a weight above SHARE


@torch.no_grad()
def spans(position: str | PositionEncoding, lengths: Sequence[int] = LENGTHS, **options) -> list[Span]:
    """Entropy and number of keys above 1 % for the last query of sequences of `lengths` tokens, queries and keys all zero.

    position: a key of POSITIONS, built for a row of lengths[0] tokens and one head with its `options`, or an encoding. An
    encoding is evaluated at the other lengths as at any other grid. Raises ValueError for a length below 1 and for an encoding
    without a bias, TypeError for options of an encoding that is already built.
    """
    if not lengths or min(lengths) < 1:
        raise ValueError(f"lengths are numbers of tokens, 1 or more, not {list(lengths)}")
    position = built_encoding(position, Grid(1, lengths[0]), 1, 4, **options)
    found = []
    for n in lengths:
        bias = zero_query_bias(evaluated(position, Grid(1, n)), Grid(1, n))
        if bias is None:
            raise ValueError(f"{encoding_name(position)} has no bias apart from content")
        p = bias[:, 0, n - 1 :].double().softmax(-1)  # [H, N]: the last query is 0 to N-1 patches after its keys
        found.append(Span(n, tuple(torch.special.entr(p).sum(-1).tolist()), tuple((p > SHARE).sum(-1).tolist())))
    return found


def attention_span(position: str | PositionEncoding, lengths: Sequence[int] = LENGTHS, **options) -> Figure:
    """Figure of `spans` (its arguments and errors): entropy by length (uniform attention: dashed), keys above 1 %."""
    found = spans(position, lengths, **options)
    name = encoding_name(position, **options)
    figure, ((entropy, above),) = sheet(1, 2, 3.2, 2.6, f"{name}: attention of the last query when all content is alike")
    n = [span.length for span in found]
    entropy.plot(n, torch.tensor(n).double().log().numpy(), color="0.6", linestyle="--", label="uniform")
    for head in range(len(found[0].entropy)):
        style = line_style(head) | {"marker": ".", "label": head_name(head, len(found[0].entropy))}
        entropy.plot(n, [span.entropy[head] for span in found], **style)
        above.plot(n, [span.above[head] for span in found], **style)
    entropy.set_ylabel("entropy (nats)", fontsize=8)
    above.set_ylabel(f"keys with a weight above {100 * SHARE:g} %", fontsize=8)
    entropy.legend(fontsize=7, frameon=False)
    for panel in (entropy, above):
        panel.set_xscale("log", base=2)
        panel.set_xticks(n, [str(length) for length in n])
        panel.set_xlabel("tokens", fontsize=8)
        panel.tick_params(labelsize=7)
        panel.grid(alpha=0.25)
    return figure
