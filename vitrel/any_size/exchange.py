"""Exchange of modules: a timm model keeps its trunk and its parameters' names, and its position modules take any grid.

An adapter is a table of classes: for each class of timm that holds position or assumes an image size, a subclass with another
forward. The model is rebuilt around the same parts: a module of a listed class becomes an object of the subclass with the same
attributes, parameters and submodules. No class is changed, so other models of timm in the process stay as they are.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn


class Adapter(NamedTuple):
    """Which classes `exchange` replaces in some models of timm, and how these models behave at another size.

    Args:
        models: classes of timm's models.
        exchanged: {class of timm: subclass that takes any grid}.
        position: the models' position encodings, for documentation.
        elsewhere: what is resampled or evaluated at another size, and where the result differs from timm's, for documentation.
        multiple: sides of an image must be multiples of this number of pixels.
    """

    models: tuple[type[nn.Module], ...]
    exchanged: Mapping[type[nn.Module], type[nn.Module]]
    position: str
    elsewhere: str
    multiple: int = 1


def exchange(model: nn.Module, adapter: Adapter) -> nn.Module:
    """Return a timm model whose modules of the classes in `adapter.exchanged` are replaced by objects of the subclasses.

    The result shares parameters and submodules with the argument, which must not be used any more. Its attribute
    dynamic_img_size is True.

    Args:
        model: a model of one of the adapter's classes.
        adapter: the one that `adapter_of` returns for the model.

    Raises:
        ValueError: a module to exchange has a forward that was set on the object, or its `AnySize.adopted` raises it.
    """
    done: dict[int, nn.Module] = {}

    def exchanged(module: nn.Module) -> nn.Module:
        if id(module) not in done:
            kind = adapter.exchanged.get(type(module))
            if kind is not None and "forward" in vars(module):
                raise ValueError(f"its {type(module).__name__} has a forward that is not its class's")
            new = module
            if kind is not None:
                new = kind.__new__(kind)
                vars(new).update(vars(module))  # the same parameters, submodules and other attributes
            done[id(module)] = new
            for name, part in module._modules.items():
                if part is not None:
                    new._modules[name] = exchanged(part)
        return done[id(module)]

    model = exchanged(model)
    for module in model.modules():
        if isinstance(module, AnySize):
            module.adopted(model)
    model.dynamic_img_size = True  # type: ignore[assignment]  # timm's name for a model that takes any size
    return model


class AnySize:
    """Mixin of exchanged modules that prepare the model for other sizes, or refuse it, before the first forward."""

    def adopted(self, model: Any) -> None:
        """Set the attributes that forward needs at other sizes; here it does nothing.

        `exchange` calls it once for each such module, when all modules of `model` are exchanged.

        Raises:
            ValueError: an option of the model rules out other sizes.
        """
