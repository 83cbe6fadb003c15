"""Networks that flatten and concatenate all observations and process them with dense layers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from maze.core.annotations import override
from maze.core.errors import ConfigError
from maze.perception.blocks.base import PerceptionBlock
from maze.perception.blocks.feed_forward.dense import DenseBlock
from maze.perception.blocks.general.concat import ConcatenationBlock
from maze.perception.blocks.general.flatten import FlattenBlock
from maze.perception.blocks.inference import InferenceBlock
from maze.perception.blocks.output.linear import LinearOutputBlock
from maze.perception.fast_layers import Linear
from maze.perception.program.network_in_torch import evaluated_by_program
from maze.perception.program.network_program import Place, Places, ProgramReader
from maze.perception.weight_init import activation_type, make_module_init_normc

EMBEDDING = "latent"
"""Key of the shared tensor in the outputs of the policy and in the inputs of the critic."""


class FlattenConcatBaseNet(nn.Module):
    """Flatten and concatenate the observations and process them by dense layers, each followed by `non_lin`.

    :param obs_shapes: Shapes of the observations, without batch dimensions, in the order of concatenation.
    :param hidden_units: Width of each dense layer.
    :param non_lin: Activation, as a class or an import path.
    :raises ConfigError: There are no observations, or there is no activation.
    """

    def __init__(
        self, obs_shapes: dict[str, Sequence[int]], hidden_units: list[int], non_lin: str | type[nn.Module]
    ) -> None:
        super().__init__()
        if not obs_shapes:
            raise ConfigError(f"{type(self).__name__}: there are no observations to process (`obs_shapes` is empty).")
        activation = activation_type(non_lin, "non_lin")
        if activation is nn.Module:
            raise ConfigError(f"{type(self).__name__}: choose an activation for `non_lin`, e.g. torch.nn.Tanh.")
        self.obs_shapes = {key: tuple(shape) for key, shape in obs_shapes.items()}
        self._output_shapes: dict[str, tuple[int, ...]] = {}
        self._dense: dict[str, Any] = {"hidden_units": list(hidden_units), "non_lin": non_lin}
        widths = [sum(math.prod(shape) for shape in self.obs_shapes.values()), *hidden_units]
        layers: list[nn.Module] = []
        for n_in, n_out in pairwise(widths):
            layers += [Linear(n_in, n_out), activation()]
        self.hidden = nn.Sequential(*layers)
        self.n_latent = widths[-1]
        self.hidden.apply(make_module_init_normc(1.0))

    def latent(self, x: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the output of the last dense layer, `[..., n_latent]`.

        :param x: Observations `[..., *shape]` by key.
        """
        flat = []
        for key, shape in self.obs_shapes.items():
            tensor = x[key] if x[key].is_floating_point() else x[key].float()
            if len(shape) != 1:
                tensor = tensor.flatten(tensor.dim() - len(shape)) if shape else tensor.unsqueeze(-1)
            flat.append(tensor)
        features = flat[0] if len(flat) == 1 else torch.cat(flat, dim=-1)
        return self.hidden(features)  # type: ignore[no-any-return]  # nn.Module.__call__

    def describe_latent(self, reader: ProgramReader, inputs: Places) -> Place:
        """Return the program of :meth:`latent`, see :mod:`maze.perception.program.network_program`.

        :param reader: Records the operations.
        :param inputs: Places of the observations by key.
        :return: Place of the result, `[..., n_latent]`.
        """
        flat = [reader.flatten(inputs[key], len(shape)) for key, shape in self.obs_shapes.items()]
        return reader.layer(self.hidden, reader.concatenate(flat, axis=-1))

    def _layers_of_outputs(self) -> Iterable[nn.Module]:
        """Return the layer of each output. Default: `heads`."""
        return self.get_submodule("heads").children()

    @evaluated_by_program
    def forward(self, x: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the outputs by key, `[..., *shape]`: logits, values of states, or values of states and actions.

        :param x: Observations, and encoded actions where they are inputs, `[..., *shape]` by key.
        """
        latent = self.latent(x)
        outputs = {}
        for (key, shape), layer in zip(self._output_shapes.items(), self._layers_of_outputs(), strict=True):
            output = layer(latent)
            outputs[key] = output if len(shape) == 1 else output.unflatten(-1, shape)
        return outputs

    def describe_forward(self, reader: ProgramReader, inputs: Places) -> Places:
        latent = self.describe_latent(reader, inputs)
        return {
            key: reader.unflatten(reader.layer(layer, latent), shape)
            for (key, shape), layer in zip(self._output_shapes.items(), self._layers_of_outputs(), strict=True)
        }

    def perception_blocks(self, latent: str = EMBEDDING) -> dict[str, PerceptionBlock]:
        """Return the network as blocks with parameters of their own, for pictures.

        :param latent: Key of the output of the dense layers.
        """
        blocks: dict[str, PerceptionBlock] = {
            f"{key}_flat": FlattenBlock(key, f"{key}_flat", shape, num_flatten_dims=len(shape))
            for key, shape in self.obs_shapes.items()
        }
        source = f"{latent}_input"
        blocks[source] = ConcatenationBlock(list(blocks), source, [b.out_shapes()[0] for b in blocks.values()], -1)
        if self._dense["hidden_units"]:
            blocks[latent] = DenseBlock(source, latent, blocks[source].out_shapes(), **self._dense)
            source = latent
        for key, shape in self._output_shapes.items():
            name = f"{key}_output" if key in self.obs_shapes else key
            blocks[name] = LinearOutputBlock(source, name, blocks[source].out_shapes(), math.prod(shape))
        return blocks

    def drawn(self) -> InferenceBlock | None:
        """Return the block that pictures show; `None`: a subclass computes something else."""
        is_described = type(self).forward is FlattenConcatBaseNet.forward
        return _drawn(self, self.perception_blocks()) if is_described else None


class FlattenConcatPolicyNet(FlattenConcatBaseNet):
    """Policy network with one linear output for each action head.

    :param obs_shapes: Shapes of the observations, without batch dimensions.
    :param action_logits_shapes: Shapes of the logits by action head.
    :param hidden_units: Width of each dense layer.
    :param non_lin: Activation, as a class or an import path.
    :param ordered_heads: Discrete heads whose choices are ordered, such as quantities. Their logits are quadratic
        functions of the choice, so that each observed choice informs about its neighbours.
    :raises ConfigError: An ordered head does not exist, or has no vector of logits.
    """

    def __init__(
        self,
        obs_shapes: dict[str, Sequence[int]],
        action_logits_shapes: dict[str, Sequence[int]],
        hidden_units: list[int],
        non_lin: str | type[nn.Module] = nn.Module,
        ordered_heads: Sequence[str] = (),
    ) -> None:
        super().__init__(obs_shapes, hidden_units, non_lin)
        self._output_shapes = {head: tuple(shape) for head, shape in action_logits_shapes.items()}
        vectors = [head for head, shape in self._output_shapes.items() if len(shape) == 1]
        if unknown := [head for head in ordered_heads if head not in vectors]:
            raise ConfigError(f"ordered_heads: expected some of the discrete heads {vectors}, found {unknown}.")
        self.heads = nn.ModuleList(
            nn.Sequential(nn.Linear(self.n_latent, 3), nn.Linear(3, shape[0], bias=False))
            if head in ordered_heads
            else Linear(self.n_latent, math.prod(shape))
            for head, shape in self._output_shapes.items()
        )
        self.heads.apply(make_module_init_normc(0.01))  # starts close to the uniform policy
        for head, layers in zip(self._output_shapes, self.heads, strict=True):
            if head in ordered_heads:
                powers = layers.get_submodule("1").requires_grad_(False)
                places = torch.linspace(-1.0, 1.0, self._output_shapes[head][0])
                powers.load_state_dict({"weight": torch.stack([torch.ones_like(places), places, places**2], -1)})


class FlattenConcatStateValueNet(FlattenConcatBaseNet):
    """State value network.

    :param obs_shapes: Shapes of the observations, without batch dimensions.
    :param hidden_units: Width of each dense layer.
    :param non_lin: Activation, as a class or an import path.
    """

    def __init__(
        self, obs_shapes: dict[str, Sequence[int]], hidden_units: list[int], non_lin: str | type[nn.Module]
    ) -> None:
        super().__init__(obs_shapes, hidden_units, non_lin)
        self._output_shapes = {"value": (1,)}
        self.value_head = Linear(self.n_latent, 1)
        self.value_head.apply(make_module_init_normc(1.0))

    @override(FlattenConcatBaseNet)
    def _layers_of_outputs(self) -> Iterable[nn.Module]:
        return (self.value_head,)


class FlattenConcatStateActionValueNet(FlattenConcatBaseNet):
    """State-action value network, see :mod:`maze.core.agent.torch_state_action_critic`.

    :param obs_shapes: Shapes of the observations, and of the encoded actions where they are inputs.
    :param q_value_shapes: Shapes of the values by key.
    :param hidden_units: Width of each dense layer.
    :param non_lin: Activation, as a class or an import path.
    """

    def __init__(
        self,
        obs_shapes: dict[str, Sequence[int]],
        q_value_shapes: dict[str, Sequence[int]],
        hidden_units: list[int],
        non_lin: str | type[nn.Module],
    ) -> None:
        super().__init__(obs_shapes, hidden_units, non_lin)
        self._output_shapes = {key: tuple(shape) for key, shape in q_value_shapes.items()}
        self.heads = nn.ModuleList(Linear(self.n_latent, math.prod(shape)) for shape in q_value_shapes.values())
        self.heads.apply(make_module_init_normc(0.1))


class FlattenConcatSharedEmbeddingPolicyNet(nn.Module):
    """Return the latent representation next to the logits, each of which is computed by layers of its own from it.

    :param obs_shapes: Shapes of the observations, without batch dimensions.
    :param action_logits_shapes: Shapes of the logits by action head.
    :param hidden_units: Width of each shared dense layer.
    :param head_units: Width of each dense layer between the latent representation and the logits.
    :param non_lin: Activation, as a class or an import path.
    :raises ConfigError: An action has the name of the embedding.
    """

    def __init__(
        self,
        obs_shapes: dict[str, Sequence[int]],
        action_logits_shapes: dict[str, Sequence[int]],
        hidden_units: list[int],
        head_units: list[int],
        non_lin: str | type[nn.Module],
    ) -> None:
        super().__init__()
        if EMBEDDING in action_logits_shapes:
            raise ConfigError(
                f"{type(self).__name__}: `{EMBEDDING}` is the key of the shared embedding; rename the action."
            )
        self.embedding = FlattenConcatBaseNet(obs_shapes, hidden_units, non_lin)
        self.policy = FlattenConcatPolicyNet(
            {EMBEDDING: (self.embedding.n_latent,)}, action_logits_shapes, head_units, non_lin
        )

    @evaluated_by_program
    def forward(self, x: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return logits by action head, and the latent representation.

        :param x: Observations `[batch, ...]`.
        """
        embedding = {EMBEDDING: self.embedding.latent(x)}
        return {**self.policy(embedding), **embedding}

    def describe_forward(self, reader: ProgramReader, inputs: Places) -> Places:
        embedding = {EMBEDDING: self.embedding.describe_latent(reader, inputs)}
        return {**reader.module(self.policy, embedding), **embedding}

    def drawn(self) -> InferenceBlock:
        """Return the block that pictures show."""
        return _drawn(self.embedding, self.embedding.perception_blocks() | self.policy.perception_blocks("hidden"))


class FlattenConcatSharedEmbeddingStateValueNet(FlattenConcatStateValueNet):
    """Values from the policy's latent representation.

    :param obs_shapes: Has the shape of the latent representation; the observations are not looked at.
    :param head_units: Width of each dense layer between the latent representation and the value.
    :param non_lin: Activation, as a class or an import path.
    :raises ConfigError: The policy's network returns no embedding.
    """

    def __init__(
        self, obs_shapes: dict[str, Sequence[int]], head_units: list[int], non_lin: str | type[nn.Module]
    ) -> None:
        if EMBEDDING not in obs_shapes:
            raise ConfigError(
                f"{type(self).__name__}: the policy's network does not return `{EMBEDDING}`; found {list(obs_shapes)}. "
                "Use it together with FlattenConcatSharedEmbeddingPolicyNet."
            )
        super().__init__({EMBEDDING: obs_shapes[EMBEDDING]}, head_units, non_lin)


def _drawn(first: FlattenConcatBaseNet, blocks: Mapping[str, PerceptionBlock]) -> InferenceBlock:
    outputs = [name for name, block in blocks.items() if isinstance(block, LinearOutputBlock)]
    return InferenceBlock(list(first.obs_shapes), outputs, list(first.obs_shapes.values()), blocks)
