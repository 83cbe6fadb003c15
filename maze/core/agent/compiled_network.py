"""Networks whose forward pass runs in NumPy, on the memory of their torch parameters.

For the batch sizes of acting, torch spends most of its time on dispatching. A network takes part by having a method
``numpy_program()`` that returns a function from observations to outputs (dictionaries of arrays ``[batch, ...]``), or
``None`` where only torch can compute it. The arrays that a program returns may be overwritten by its next call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

NumpyProgram = Callable[[Mapping[str, np.ndarray]], Mapping[str, np.ndarray]]


class CompiledNetwork:
    """A network's NumPy program, and the parameters whose memory it reads.

    :param network: The torch network.
    :param program: Its forward pass.
    """

    def __init__(self, network: nn.Module, program: NumpyProgram) -> None:
        self._program = program
        self._parameters = [
            (module._parameters, name, parameter, parameter.data_ptr())
            for module in network.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]

    def __call__(self, observation: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """The network's outputs for a batch of observations of any dtype."""
        for array in observation.values():
            if array.dtype != np.float32:
                observation = {key: value.astype(np.float32) for key, value in observation.items()}
                break
        return self._program(observation)

    def is_current(self) -> bool:
        """Whether all parameters are the same tensors at the same place (in-place updates are seen anyway)."""
        for parameters, name, parameter, address in self._parameters:
            if parameters.get(name) is not parameter or parameter.data_ptr() != address:
                return False
        return True


def compile_network(network: nn.Module) -> CompiledNetwork | None:
    """The compiled network, or ``None`` where only torch can compute it faithfully."""
    if not has_own_method(type(network), "numpy_program"):
        return None
    for module in network.modules():
        if module._forward_hooks or module._forward_pre_hooks:
            return None
    for parameter in network.parameters():
        if parameter.device.type != "cpu" or parameter.dtype is not torch.float32:
            return None
    program: NumpyProgram | None = network.numpy_program()  # type: ignore[operator]  # nn.Module hides methods
    return None if program is None else CompiledNetwork(network, program)


def has_own_method(network_type: type[Any], name: str) -> bool:
    """Whether a method that describes ``forward`` belongs to the very one in use, not to one that a subclass replaced.

    :param network_type: Class of a network.
    :param name: Name of the method.
    """
    for base in network_type.__mro__:
        if name in vars(base):
            return True
        if "forward" in vars(base):
            return False
    return False
