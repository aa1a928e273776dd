"""Whether torch.export is at work."""

import torch

_TELLS = torch.__version__ >= (2, 14)


def exporting() -> bool:
    """torch.compiler.is_exporting(), also before torch 2.14, where torch.compile takes it for true (pytorch issue 176347)."""
    return torch.compiler.is_exporting() if _TELLS else torch.compiler._is_exporting_flag
