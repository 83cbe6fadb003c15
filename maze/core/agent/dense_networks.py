"""Networks of dense layers as one differentiable operation.

For the batches that off-policy learning draws, much of a network's time goes into everything but its matrix products:
nodes of the autograd graph, fresh memory for each intermediate result, gradients that nobody asked for. Here several
networks of the same layers (the twins of a critic) on the same input are a single node of the graph, and what it
computes in between lives in memory that is used again and again.

A network takes part by having a method ``dense_layers()`` that describes its ``forward``, or returns ``None`` where
that is something else. It stays the module that it is: its own parameters are read at each call and get the gradients.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules import module as _hooks

from maze.core.agent.compiled_network import has_own_method

TensorDict = dict[str, Tensor]

_MAX_BATCH_SIZES = 8
"""For so many different batch sizes memory is kept."""
_NARROW = 16
"""Products whose result has at most so many columns are several times faster when they are computed transposed."""


@dataclass(frozen=True)
class DenseLayers:
    """A network that concatenates its flattened inputs, applies dense layers, and linear heads to the last of them."""

    input_shapes: Mapping[str, tuple[int, ...]]
    """In the order of concatenation, without batch dimensions."""
    hidden: Sequence[nn.Linear]
    activation: type[nn.Module]
    """``ReLU`` or ``Tanh``, after each hidden layer."""
    heads: Mapping[str, nn.Linear]
    """By output key."""

    @property
    def layers(self) -> list[nn.Linear]:
        """All layers, the heads last."""
        return [*self.hidden, *self.heads.values()]

    @property
    def structure(self) -> Any:
        """What two networks that are evaluated together have in common."""
        shapes = [layer.weight.shape for layer in self.layers]
        return dict(self.input_shapes), list(self.input_shapes), self.activation, list(self.heads), shapes


class DenseNetworks:
    """Evaluates networks of the same layers on the same input; see :func:`dense_networks`.

    :param networks: The networks.
    :param descriptions: What they consist of.
    """

    def __init__(self, networks: Sequence[nn.Module], descriptions: Sequence[DenseLayers]) -> None:
        first = descriptions[0]
        self._networks = list(networks)
        parents = [module for network in networks for module in network.modules()]
        self._sizes = [(parent._modules, len(parent._modules)) for parent in parents if parent._modules]
        self._modules = [
            (parent._modules, name, module)
            for parent in parents
            for name, module in parent._modules.items()
            if module is not None
        ]
        self._layers = [own for same in zip(*(one.layers for one in descriptions), strict=True) for own in same]
        self._input_shapes = dict(first.input_shapes)
        self._heads = list(first.heads)
        self._n_networks = len(descriptions)
        self._hidden_widths = [layer.out_features for layer in first.hidden]
        self._activation = first.activation
        self._free: dict[int, list[_Memory]] = {}

    def is_current(self) -> bool:
        """Whether the networks consist of the same layers, float32 on the CPU, and nobody listens to what these do."""
        weight = self._layers[0].weight
        if weight.dtype is not torch.float32 or weight.device.type != "cpu":
            return False
        if _has_global_hooks() or any(_is_observed(network) for network in self._networks):
            return False
        if any(len(modules) != size for modules, size in self._sizes):
            return False
        return all(modules.get(name) is module and not _is_observed(module) for modules, name, module in self._modules)

    def __call__(self, inputs: Mapping[str, Tensor], learn_parameters: bool = True) -> list[TensorDict]:
        """The outputs of each network by key.

        :param inputs: With any leading batch dimensions.
        :param learn_parameters: Whether gradients reach the parameters, or the inputs alone.
        """
        features = self._features(inputs)
        batch_shape = features.shape[:-1]
        if len(batch_shape) != 1:
            features = features.reshape(-1, features.shape[-1])
        parameters: list[Tensor] = [p for layer in self._layers for p in (layer.weight, layer.bias)]
        if not learn_parameters:
            parameters = [parameter.detach() for parameter in parameters]
        outputs: Sequence[Tensor]
        if torch.is_grad_enabled():
            outputs = _Evaluation.apply(self, features, *parameters)  # type: ignore[no-untyped-call]  # torch's
        else:
            outputs, memory = self.evaluate(features, parameters)
            self.release(memory)
        if len(batch_shape) != 1:
            outputs = [output.reshape(*batch_shape, output.shape[-1]) for output in outputs]
        n = self._n_networks
        return [{head: outputs[row * n + index] for row, head in enumerate(self._heads)} for index in range(n)]

    def _features(self, inputs: Mapping[str, Tensor]) -> Tensor:
        parts = []
        for key, shape in self._input_shapes.items():
            part = inputs[key].float()
            if len(shape) != 1:
                part = part.flatten(part.dim() - len(shape)) if shape else part.unsqueeze(-1)
            parts.append(part)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    # -- the operation itself; parameters come by layer, network, and weight before bias ------------------------------

    def evaluate(self, features: Tensor, parameters: Sequence[Tensor]) -> tuple[list[Tensor], _Memory]:
        """Outputs by head and network, ``[B, n]`` each, and the memory that holds what was computed in between."""
        n = self._n_networks
        memory = self._acquire(len(features))
        below = [features] * n
        position = 0
        for hidden in memory.hidden:
            for index in range(n):
                weight, bias = parameters[position], parameters[position + 1]
                torch.addmm(bias, below[index], weight.t(), out=hidden.rows[index])
                position += 2
            torch.relu_(hidden.all) if self._activation is nn.ReLU else torch.tanh_(hidden.all)
            below = hidden.rows
        outputs = []
        for _ in self._heads:
            for index in range(n):
                outputs.append(torch.addmm(parameters[position + 1], below[index], parameters[position].t()))
                position += 2
        return outputs, memory

    def differentiate(
        self,
        memory: _Memory,
        features: Tensor,
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor],
        wants_features: bool,
        wants_parameters: bool,
    ) -> list[Tensor | None]:
        """Gradients of features and parameters, from those of the outputs.

        Results of hidden layers give way to the gradients of what went into their activations.
        """
        n, n_hidden = self._n_networks, len(memory.hidden)
        found: list[Tensor | None] = [None] * len(parameters)

        def learn(layer: int, index: int, delta: Tensor, below: Tensor) -> None:
            if wants_parameters:
                position = 2 * (layer * n + index)
                found[position], found[position + 1] = _transposed_product(delta, below), delta.sum(0)

        deltas = [list(gradients[row * n : (row + 1) * n]) for row in range(len(self._heads))]
        layers = list(range(n_hidden, n_hidden + len(self._heads)))
        for level in range(n_hidden, 0, -1):
            hidden = memory.hidden[level - 1]
            passed = memory.passed[self._hidden_widths[level - 1]]
            for index in range(n):
                for layer, delta in zip(layers, deltas, strict=True):
                    learn(layer, index, delta[index], hidden.rows[index])
                    weight = parameters[2 * (layer * n + index)]
                    if layer == layers[0]:
                        torch.mm(delta[index], weight, out=passed.rows[index])
                    else:
                        passed.rows[index].addmm_(delta[index], weight)
            self._through_activation(passed.all, hidden.all)
            deltas, layers = [hidden.rows], [level - 1]
        total: Tensor | None = None
        for layer, delta in zip(layers, deltas, strict=True):
            for index in range(n):
                learn(layer, index, delta[index], features)
                if wants_features:
                    part = _product(delta[index], parameters[2 * (layer * n + index)])
                    total = part if total is None else total + part
        return [total, *found]

    def _through_activation(self, gradient: Tensor, output: Tensor) -> None:
        """Writes the gradient with respect to the activation's input to where its output is."""
        if self._activation is nn.ReLU:
            torch.ops.aten.threshold_backward.grad_input(gradient, output, 0, grad_input=output)
        else:
            torch.ops.aten.tanh_backward.grad_input(gradient, output, grad_input=output)

    # -- memory -------------------------------------------------------------------------------------------------------

    def _acquire(self, batch_size: int) -> _Memory:
        free = self._free.get(batch_size)
        return free.pop() if free else _Memory(batch_size, self._n_networks, self._hidden_widths)

    def release(self, memory: _Memory) -> None:
        """Lets another evaluation have the memory."""
        if memory.batch_size not in self._free and len(self._free) == _MAX_BATCH_SIZES:
            self._free.pop(next(iter(self._free)))
        self._free.setdefault(memory.batch_size, []).append(memory)


def describe_dense_layers(
    input_shapes: Mapping[str, tuple[int, ...]],
    hidden: Sequence[nn.Module],
    activations: Sequence[nn.Module],
    heads: Mapping[str, nn.Module],
) -> DenseLayers | None:
    """A description of these layers; ``None``: they are not what :class:`DenseNetworks` can evaluate.

    :param input_shapes: In the order of concatenation, without batch dimensions.
    :param hidden: Dense layers, one after the other.
    :param activations: What follows each of them.
    :param heads: Linear layers on top of the last one, by output key.
    """
    linear = [layer for layer in [*hidden, *heads.values()] if type(layer) is nn.Linear and layer.bias is not None]
    types = {type(activation) for activation in activations} or {nn.ReLU}
    if len(linear) < len(hidden) + len(heads) or len(activations) != len(hidden) or len(types) > 1:
        return None
    activation = types.pop()
    if activation not in (nn.ReLU, nn.Tanh):
        return None
    n_hidden = len(hidden)
    return DenseLayers(input_shapes, linear[:n_hidden], activation, dict(zip(heads, linear[n_hidden:], strict=True)))


def dense_networks(networks: Sequence[nn.Module]) -> DenseNetworks | None:
    """The networks as one operation; ``None`` where they differ in structure, or are no plain dense networks."""
    descriptions: list[DenseLayers] = []
    for network in networks:
        if not has_own_method(type(network), "dense_layers"):
            return None
        description = network.dense_layers()  # type: ignore[operator]  # nn.Module hides methods
        if description is None:
            return None
        descriptions.append(description)
    if any(description.structure != descriptions[0].structure for description in descriptions):
        return None
    together = DenseNetworks(networks, descriptions)
    return together if together.is_current() else None


class JointEvaluation:
    """Evaluates networks on the same input: as one operation where possible, else one after the other.

    :param networks: The networks, which may train on but not move to another device.
    """

    def __init__(self, networks: Sequence[nn.Module]) -> None:
        self._networks = list(networks)
        self._dense = dense_networks(self._networks)

    def is_of(self, networks: Iterable[nn.Module]) -> bool:
        """Whether these are still the networks."""
        return all(map(operator.is_, self._networks, networks))

    def __call__(self, inputs: Mapping[str, Tensor], learn_parameters: bool = True) -> list[TensorDict]:
        """The outputs of each network by key.

        :param inputs: With any leading batch dimensions.
        :param learn_parameters: False: gradients of the parameters will not be asked for, so they may be spared.
        """
        dense = self._dense
        if dense is not None and not dense.is_current():
            dense = self._dense = dense_networks(self._networks)
        if dense is not None:
            return dense(inputs, learn_parameters)
        return [network(inputs) for network in self._networks]


def _is_observed(module: nn.Module) -> bool:
    """Whether a module has hooks, or a ``forward`` that is not its class's."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
    )


def _has_global_hooks() -> bool:
    """Whether somebody listens to all modules."""
    return bool(
        _hooks._global_forward_hooks
        or _hooks._global_forward_pre_hooks
        or _hooks._global_backward_hooks
        or _hooks._global_backward_pre_hooks
    )


class _Memory:
    """Intermediate results of one evaluation: nobody else's until its gradients have been computed."""

    def __init__(self, batch_size: int, n_networks: int, widths: Sequence[int]) -> None:
        self.batch_size = batch_size
        self.hidden = [_Rows(n_networks, batch_size, width) for width in widths]
        self.passed = {width: _Rows(n_networks, batch_size, width) for width in widths}


class _Rows:
    """A tensor ``[n_networks, batch, width]`` and its parts."""

    def __init__(self, *shape: int) -> None:
        self.all = torch.empty(shape)
        self.rows = list(self.all)


class _Evaluation(torch.autograd.Function):
    """Connects :class:`DenseNetworks` to autograd."""

    @staticmethod
    def forward(ctx: Any, networks: DenseNetworks, features: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        outputs, ctx.memory = networks.evaluate(features, parameters)
        ctx.networks = networks
        ctx.save_for_backward(features, *parameters)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        features, *parameters = ctx.saved_tensors
        memory, ctx.memory = ctx.memory, None
        if memory is None:
            raise RuntimeError("The gradients of these outputs were computed before; evaluate the networks again.")
        _, wants_features, *wants_parameters = ctx.needs_input_grad
        found = ctx.networks.differentiate(
            memory, features, parameters, gradients, wants_features, any(wants_parameters)
        )
        ctx.networks.release(memory)
        return (None, *found)


def _product(left: Tensor, right: Tensor) -> Tensor:
    return (right.t() @ left.t()).t() if right.shape[1] <= _NARROW else left @ right


def _transposed_product(left: Tensor, right: Tensor) -> Tensor:
    """``left.T @ right``"""
    return (right.t() @ left).t() if right.shape[1] <= _NARROW else left.t() @ right
