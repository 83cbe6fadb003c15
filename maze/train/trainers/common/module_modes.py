"""Networks that compute something else in training than in evaluation."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterable

from torch import nn

_DEPEND_ON_MODE = (
    nn.modules.batchnorm._NormBase,
    nn.modules.dropout._DropoutNd,
    nn.RNNBase,
    nn.MultiheadAttention,
    nn.TransformerEncoderLayer,
    nn.RReLU,
)


def depends_on_mode(networks: Iterable[nn.Module]) -> bool:
    """Whether networks may compute something else in training than in evaluation.

    :param networks: Modules of others than torch and Maze are searched for methods that ask for the mode.
    """
    return any(
        isinstance(module, _DEPEND_ON_MODE) or _asks_for_mode(type(module))
        for network in networks
        for module in network.modules()
    )


def _asks_for_mode(module_type: type[nn.Module]) -> bool:
    if module_type.__module__.startswith(("torch.nn.", "maze.perception.")):
        return False
    own_types = itertools.takewhile(lambda each: each is not nn.Module, module_type.__mro__)
    members = [member for each in own_types for member in vars(each).values()]
    codes = [code for member in members if (code := getattr(inspect.unwrap(member), "__code__", None)) is not None]
    return any("training" in code.co_names for code in codes)
