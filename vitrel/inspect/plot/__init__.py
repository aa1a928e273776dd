"""Figures of position in a model: what it adds at each offset, and its effect on attention. All return a matplotlib Figure.

>>> vitrel.inspect.plot.offset_maps(timm.create_model("vitrel_vit_n8_alibi"), size=96).savefig("maps.png")

Offsets are query minus key, in patches: dy > 0: the key is above the query, dx > 0: to its left.
"""

from vitrel.common.extras import optional_import

with optional_import():
    from vitrel.inspect.plot.embedding import similarity
    from vitrel.inspect.plot.leak import leak
    from vitrel.inspect.plot.offsets import Lattice, lattices, offset_maps
    from vitrel.inspect.plot.on_image import attention

__all__ = ["Lattice", "attention", "lattices", "leak", "offset_maps", "similarity"]
