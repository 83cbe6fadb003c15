"""Networks in torch: several on one input with gradients, and one with many sets of parameters."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from maze.perception.program.network_program import (
    Activation,
    Apply,
    Array,
    Linear,
    Operation,
    Program,
    read_program,
)

TensorDict = dict[str, Tensor]


class JointEvaluation:
    """Evaluates networks on the same input, such as the twins of a critic.

    For the batches that off-policy learning draws, a good part of a network's time goes into calling its modules and
    into preparing the input. Programs need no calls, and share what they do before their first layer. Networks of
    which one cannot be read are called one after the other.

    :param networks: The networks, which may train on.
    """

    def __init__(self, networks: Sequence[nn.Module]) -> None:
        self._networks = list(networks)
        self._read()

    def is_of(self, networks: Iterable[nn.Module]) -> bool:
        """Whether these are still the networks."""
        return all(map(operator.is_, self._networks, networks))

    def __call__(self, inputs: Mapping[str, Tensor]) -> list[TensorDict]:
        """The outputs of each network by key.

        :param inputs: With any leading batch dimensions.
        """
        if any(not program.modules.are_unchanged() for program in self._programs):
            self._read()
        if self._programs:
            try:
                return self._run_programs(inputs)
            except (KeyError, RuntimeError):
                pass  # the networks say better what they miss
        return [network(inputs) for network in self._networks]

    def _run_programs(self, inputs: Mapping[str, Tensor]) -> list[TensorDict]:
        first = self._programs[0]
        shared: list[Any] = [None] * max(program.n_places for program in self._programs)
        for key, place in first.inputs.items():
            tensor = inputs[key]
            shared[place] = tensor if tensor.is_floating_point() else tensor.float()
        _run(first.operations[: self._n_shared], shared)
        outputs = []
        for program in self._programs:
            places = shared.copy()
            _run(program.operations[self._n_shared :], places)
            outputs.append({key: places[place] for key, place in program.outputs.items()})
        return outputs

    def _read(self) -> None:
        programs = [read_program(network) for network in self._networks]
        readable = [program for program in programs if program is not None]
        is_common = len(readable) == len(programs) and all(one.inputs == readable[0].inputs for one in readable)
        self._programs = readable if is_common else []
        self._n_shared = _n_shared_operations(self._programs)


class TorchPopulation:
    """One network of any kind with many sets of parameters, mapped over them by `torch.func.vmap`.

    :param network: The network; it computes what it is called for, as it is.
    :param stacked: Arrays `[n_rows, *shape]` for parameters, by `id`; their memory is read at every call. Other
        parameters are the network's own.
    """

    def __init__(self, network: nn.Module, stacked: Mapping[int, Array]) -> None:
        self._network = network
        # each place once, although modules and parameters may be registered under several names
        self._slots: list[tuple[dict[str, Any], str, int]] = [
            (module._parameters, name, id(parameter))
            for module in network.modules()
            for name, parameter in module._parameters.items()
            if id(parameter) in stacked
        ]
        self._stacked = {key: torch.from_numpy(stacked[key]) for _, _, key in self._slots}

    def __call__(self, observation: Mapping[str, Array], rows: slice | Array) -> TensorDict:
        """The network's outputs `[batch, ...]`.

        :param observation: Arrays `[batch, ...]`.
        :param rows: Whose parameters are used, for the observation at the same place in the batch.
        :raises RuntimeError: An operation of the network cannot be mapped.
        """
        index = rows if isinstance(rows, slice) else torch.from_numpy(rows)
        parameters = {key: tensor[index] for key, tensor in self._stacked.items()}
        inputs = {key: torch.as_tensor(array, dtype=torch.get_default_dtype()) for key, array in observation.items()}
        outputs: TensorDict = torch.func.vmap(self._one)(parameters, inputs)
        return outputs

    def _one(self, parameters: dict[int, Tensor], observation: TensorDict) -> TensorDict:
        replaced = [slots[name] for slots, name, _ in self._slots]
        try:
            for slots, name, key in self._slots:
                slots[name] = parameters[key]
            outputs = self._network({key: value.unsqueeze(0) for key, value in observation.items()})
        finally:
            for (slots, name, _), parameter in zip(self._slots, replaced, strict=True):
                slots[name] = parameter
        return {key: value.squeeze(0) for key, value in outputs.items()}


def _n_shared_operations(programs: Sequence[Program]) -> int:
    """How many operations at the beginning are the same for all programs."""
    n_shared = 0
    for operations in zip(*(program.operations for program in programs), strict=False):
        if any(operation != operations[0] for operation in operations):
            break
        n_shared += 1
    return n_shared


def _run(operations: Iterable[Operation], at: list[Any]) -> None:
    """Fills the places of all results."""
    for operation in operations:
        match operation:
            case Linear(source, target, layer):
                parameters: Any = layer._parameters  # found faster than attributes of a module
                at[target] = functional.linear(at[source], parameters["weight"], parameters["bias"])
            case Activation(source, target, layer):
                at[target] = layer.forward(at[source])
            case Apply(sources, target, function):
                at[target] = function.in_torch(*[at[source] for source in sources])
