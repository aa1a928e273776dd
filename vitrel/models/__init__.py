"""ViT and Swin backbones with any position encoding.

Importing this module registers them with timm, under names that begin with vitrel_.
"""

from timm.layers import register_notrace_module

from vitrel.layers import Attention, PatchMerging
from vitrel.models.backbone import Backbone
from vitrel.models.swin import Swin
from vitrel.models.vit import ViT
from vitrel.position import POSITIONS
from vitrel.position.terms import Composition

__all__ = ["Backbone", "Swin", "ViT"]

# Leaves of fx graphs: they compute with the sizes of their input, which a trace through them would make constants.
for _leaf in (Attention, PatchMerging, Composition, *POSITIONS.values()):
    register_notrace_module(_leaf)
