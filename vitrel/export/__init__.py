"""Export of models: torch.export programs, ONNX graphs, and folders that timm reads."""

from vitrel.export.write import SUFFIXES, TOLERANCE, check_sizes, export_model

__all__ = ["SUFFIXES", "TOLERANCE", "check_sizes", "export_model"]
