"""Parts of template networks: action heads with masks, and cuts where embeddings are shared."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from gymnasium import spaces

from maze.core.annotations import override
from maze.core.errors import ConfigError
from maze.distributions.distribution_mapper import DistributionMapper
from maze.perception.blocks.base import PerceptionBlock, TensorDict
from maze.perception.blocks.general.action_masking import ActionMaskingBlock
from maze.perception.blocks.general.functional import FunctionalBlock
from maze.perception.blocks.general.slice import SliceBlock
from maze.perception.blocks.inference import InferenceBlock
from maze.perception.blocks.output.linear import LinearOutputBlock
from maze.perception.builders.base import WHERE
from maze.perception.program.network_program import Places, ProgramReader
from maze.perception.weight_init import make_module_init_normc

_MASKS = "model.action_masks"


class PolicyBlock(InferenceBlock):
    """A policy network, whose action heads may be called like its observations.

    :param heads: For outputs that are action heads under another name, that head.
    """

    def __init__(
        self,
        in_keys: list[str],
        out_keys: list[str],
        in_shapes: Sequence[Sequence[int]],
        perception_blocks: Mapping[str, PerceptionBlock],
        heads: Mapping[str, str],
    ) -> None:
        super().__init__(in_keys, out_keys, in_shapes, perception_blocks)
        self._heads = dict(heads)

    @override(InferenceBlock)
    def forward(self, block_input: TensorDict) -> TensorDict:
        return {self._heads.get(key, key): tensor for key, tensor in super().forward(block_input).items()}

    @override(InferenceBlock)
    def describe_forward(self, reader: ProgramReader, inputs: Places) -> Places:
        return {self._heads.get(key, key): place for key, place in super().describe_forward(reader, inputs).items()}


class ActionHeads:
    """Builds the output blocks of policy networks.

    :param distribution_mapper: Knows how many logits each action head needs.
    :param masks: For action heads, the observation with their mask.
    """

    def __init__(self, distribution_mapper: DistributionMapper, masks: Mapping[str, str]) -> None:
        self._mapper = distribution_mapper
        self.masks = dict(masks)

    def check_masks(
        self, action_spaces: Mapping[Any, spaces.Dict], observation_spaces: Mapping[Any, spaces.Dict]
    ) -> None:
        """Compares the masks with the spaces.

        :raises ConfigError: Names the action head, and the sub-step.
        """
        for head, mask in self.masks.items():
            if head not in self._mapper.action_heads:
                known = ", ".join(self._mapper.action_heads)
                raise ConfigError(f"{_MASKS}.{head}: there is no such action head. Known: {known}.")
            for step_key, action_space in action_spaces.items():
                found = observation_spaces[step_key].spaces
                if head in action_space.spaces and mask not in found:
                    raise ConfigError(
                        f"{_MASKS}.{head}: sub-step {step_key!r} has no observation `{mask}`. "
                        f"Observations: {', '.join(found)}."
                    )
            space = self._mapper.action_space.spaces[head]
            if not isinstance(space, spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary):
                raise ConfigError(f"{_MASKS}.{head}: only discrete actions can be masked, found {space}.")

    def mask_keys(self, action_space: spaces.Dict) -> list[str]:
        """Observations that mask heads of this space."""
        return list(dict.fromkeys(mask for head, mask in self.masks.items() if head in action_space.spaces))

    def blocks(
        self, action_space: spaces.Dict, perception_net: InferenceBlock, obs_shapes: Mapping[str, Sequence[int]]
    ) -> dict[str, PerceptionBlock]:
        """The blocks from the latent representation to the logits of all heads.

        The logits of a head that is called like an observation are called `<head>_action`.
        """
        blocks: dict[str, PerceptionBlock] = {}
        latent, latent_shapes = perception_net.out_keys[0], perception_net.out_shapes()
        for head, name in head_names(action_space, obs_shapes).items():
            shape = tuple(self._mapper.required_logits_shape(head))
            mask = self.masks.get(head)
            stages = [name]
            if mask is not None:
                stages.insert(0, f"{head}_logits")
            if len(shape) != 1:
                stages.insert(0, f"{head}_flat_logits")
            linear = LinearOutputBlock(latent, stages[0], latent_shapes, output_units=math.prod(shape))
            blocks[stages[0]] = linear.apply(make_module_init_normc(0.01))  # starts close to the uniform policy
            if len(shape) != 1:
                unflatten = partial(_unflatten, shape=shape)
                blocks[stages[1]] = FunctionalBlock(stages[0], stages[1], linear.out_shapes(), unflatten)
            if mask is not None:
                blocks |= self._masking(head, stages[-2:], shape, mask, tuple(obs_shapes[mask]))
        return blocks

    def _masking(
        self, head: str, names: Sequence[str], shape: tuple[int, ...], mask: str, mask_shape: tuple[int, ...]
    ) -> dict[str, PerceptionBlock]:
        """The blocks that mask logits.

        :param names: Of the logits, and of the masked ones.
        """
        blocks: dict[str, PerceptionBlock] = {}
        if mask_shape[1:] == shape:  # observations of several time steps: the present one decides
            current = f"{head}_mask"
            blocks[current] = SliceBlock(mask, current, [mask_shape], slice_dim=-len(mask_shape), slice_idx=-1)
            mask, mask_shape = current, shape
        if mask_shape != shape:
            raise ConfigError(
                f"{_MASKS}.{head}: observation `{mask}` has the shape {mask_shape}, but the action head has logits of "
                f"the shape {shape}; a mask needs an entry for each of them."
            )
        space = self._mapper.action_space.spaces[head]
        sizes = [int(size) for size in space.nvec.flatten()] if isinstance(space, spaces.MultiDiscrete) else None
        blocks[names[1]] = ActionMaskingBlock(
            [names[0], mask],
            names[1],
            [shape, mask_shape],
            num_actors=len(sizes) if sizes else 1,
            num_of_actor_actions=sizes,
            require_valid_action=not isinstance(space, spaces.MultiBinary),
        )
        return blocks


def head_names(action_space: spaces.Dict, observations: Container[str]) -> dict[str, str]:
    """For action heads, the names of their logits among the tensors of a network.

    :param action_space: The heads.
    :param observations: The names of the observations.
    """
    return {head: f"{head}_action" if head in observations else head for head in action_space.spaces}


def check_latent(perception_net: InferenceBlock) -> None:
    """The template's outputs need one latent vector.

    :raises ConfigError: The perception network returns something else.
    """
    shapes = dict(zip(perception_net.out_keys, perception_net.out_shapes(), strict=True))
    if len(shapes) != 1 or any(len(shape) != 1 for shape in shapes.values()):
        raise ConfigError(
            f"{WHERE}: the outputs of policy and critic need one latent vector, but the perception network returns "
            f"{shapes}. End with a block that returns a vector, such as LSTMLastStepBlock as recurrence."
        )


def resolve_shared_keys(perception_net: InferenceBlock, shared_embedding_keys: Sequence[str]) -> list[str]:
    """Checks the keys of shared embeddings; `latent` stands for the last tensor of the perception network.

    :raises ConfigError: Names the key that no block produces.
    """
    produced = [key for block in perception_net.perception_blocks.values() for key in block.out_keys]
    resolved = []
    for key in shared_embedding_keys:
        name = perception_net.out_keys[0] if key == "latent" and key not in produced else key
        if name not in produced:
            raise ConfigError(
                f"{WHERE}.shared_embedding_keys: no block produces `{key}`. There are: {', '.join(produced)}."
            )
        resolved.append(name)
    return list(dict.fromkeys(resolved))


def cut_at(
    perception_net: InferenceBlock, shared_keys: Sequence[str]
) -> tuple[dict[str, Sequence[int]], dict[str, PerceptionBlock]]:
    """What is left of a perception network when some of its tensors are given.

    :return: Shapes of the inputs by key, and the blocks.
    """
    if not shared_keys:
        in_shapes = dict(zip(perception_net.in_keys, perception_net.in_shapes, strict=True))
        return in_shapes, dict(perception_net.perception_blocks)
    producers = {key: name for name, block in perception_net.perception_blocks.items() for key in block.out_keys}
    shapes, inputs, needed = perception_net.tensor_shapes(), {}, set()
    waiting = list(perception_net.out_keys)
    while waiting:
        key = waiting.pop()
        if key in shared_keys or key not in producers:
            inputs[key] = shapes[key]
        elif producers[key] not in needed:
            needed.add(producers[key])
            waiting += perception_net.perception_blocks[producers[key]].in_keys
    return inputs, {name: block for name, block in perception_net.perception_blocks.items() if name in needed}


def _unflatten(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return tensor.reshape(tensor.shape[:-1] + torch.Size(shape))
