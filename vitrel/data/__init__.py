"""Data sets: `shapes` (synthetic images), folders of images, CSVs, tar files, Hugging Face's and torchvision's sets.

`create_dataset` builds any of them by name or path. Augmentation and decoding are here too.
"""

from vitrel.data.augmentation import Augmentation
from vitrel.data.create import SHAPES, class_names, create_dataset, create_shapes
from vitrel.data.dense_shapes import DenseShapes
from vitrel.data.prepare import Prepare, normalize
from vitrel.data.readers.base import Draw, ImageSet, Reader, collate
from vitrel.data.readers.decode import IGNORED, BadImage, Reading, decode
from vitrel.data.readers.masks import MaskSet
from vitrel.data.shapes import Drawn, Shapes

__all__ = [
    "IGNORED",
    "SHAPES",
    "Augmentation",
    "BadImage",
    "DenseShapes",
    "Draw",
    "Drawn",
    "ImageSet",
    "MaskSet",
    "Prepare",
    "Reader",
    "Reading",
    "Shapes",
    "class_names",
    "collate",
    "create_dataset",
    "create_shapes",
    "decode",
    "normalize",
]
