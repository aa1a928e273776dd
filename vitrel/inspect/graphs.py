"""How many graphs torch.compile makes of a model over several image sizes, counted without generating code."""

from collections.abc import Iterable

import torch
from torch import nn

from vitrel.inspect.resolution_report import Pair


def count_graphs(models: Iterable[tuple[nn.Module, Pair]]) -> int | str:
    """Graphs of torch.compile(dynamic=True) for images [2, C, h, w] of every (model, size in pixels) in turn.

    The same model object is compiled once and then meets its sizes. A text, the reason, where a model cannot be compiled.
    Clears what torch.compile has cached, before and after.
    """
    from torch._dynamo.testing import CompileCounter  # imports what only compilation needs

    counter, compiled = CompileCounter(), {}
    torch._dynamo.reset()
    try:
        for model, size in models:
            run = compiled.setdefault(id(model), (torch.compile(model.eval(), backend=counter, dynamic=True), model))[0]
            with torch.no_grad():
                run(torch.zeros(2, getattr(model, "in_chans", 3), *size, device=next(model.parameters()).device))
    except Exception as error:  # whatever a foreign forward or the compiler raises
        return f"failed: {type(error).__name__}"
    finally:
        torch._dynamo.reset()
    return counter.frame_count
