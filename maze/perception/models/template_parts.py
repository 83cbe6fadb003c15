"""Parts of template networks: action heads with masks, and shared embeddings."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, cast

import numpy as np
import torch
from gymnasium import spaces

from maze.core.annotations import override
from maze.core.errors import ConfigError, unknown_key_error
from maze.core.utils.config_utils import positive_number
from maze.distributions.distribution_mapper import DistributionMapper
from maze.distributions.gaussian import DiagonalGaussianProbabilityDistribution
from maze.distributions.squashed_gaussian import SquashedGaussianProbabilityDistribution
from maze.perception.blocks.base import PerceptionBlock, TensorDict
from maze.perception.blocks.general.action_masking import ActionMaskingBlock
from maze.perception.blocks.general.functional import FunctionalBlock
from maze.perception.blocks.general.slice import SliceBlock
from maze.perception.blocks.inference import InferenceBlock
from maze.perception.blocks.joint_blocks.set_blocks import ItemScoresBlock
from maze.perception.blocks.output.linear import GaussianOutputBlock, LinearOutputBlock
from maze.perception.builders.base import WHERE, encoded_items_key, free_name, normalized_key, scaled_key
from maze.perception.program.network_program import Places, ProgramReader
from maze.perception.weight_init import Initialization

_MASKS = "model.action_masks"
_ITEMS = "model.action_items"
# Number of rows of a batch below which gathering costs more than it saves.
_MANY_ROWS = 4096
# Share of rows of the largest set of a batch up to which gathering pays.
_SHARE_WORTH_IT = 0.75
_GAUSSIAN = (DiagonalGaussianProbabilityDistribution, SquashedGaussianProbabilityDistribution)


@dataclass(frozen=True)
class _Rows:
    """Indices of gathered rows of sets, `(n_rows,)` each."""

    batch: torch.Tensor
    """Index of the set in the flattened batch."""
    before: torch.Tensor
    """Index of the row in the set before gathering."""
    now: torch.Tensor
    """Index of the row in the set after gathering."""
    n_before: int
    """Number of rows of a set before gathering."""


@dataclass(frozen=True)
class Candidates:
    """The candidates of an action head: the largest possible number of rows, of which a batch often needs few."""

    items: str
    """Observation `(batch, n, features)` with a row for each candidate."""
    masks: tuple[str, ...]
    """Observations `(batch, n)`: rows that exist, and rows that may be chosen."""

    def gathered(self, inputs: TensorDict) -> tuple[TensorDict, _Rows] | None:
        """Reduce the inputs to the number of rows of the largest set of the batch.

        :param inputs: Inputs with any leading batch dimensions.
        :return: The inputs and the indices of their rows. None: it does not pay.
        """
        if torch.compiler.is_compiling() or not all(key in inputs for key in (self.items, *self.masks)):
            return None  # graphs cannot branch on values; blocks report missing inputs
        mask = inputs[self.masks[0]]
        if mask.numel() < _MANY_ROWS or mask.is_cuda:
            return None
        exists = reduce(torch.logical_or, [inputs[key] > 0 for key in self.masks]).flatten(0, -2)
        counts = exists.sum(-1)
        n, n_kept = mask.shape[-1], int(counts.max())
        if not 0 < n_kept <= _SHARE_WORTH_IT * n:
            return None
        batch, place = exists.nonzero(as_tuple=True)
        first = counts.cumsum(0) - counts
        now = torch.arange(len(batch), device=mask.device) - first[batch]
        gathered = dict(inputs)
        for key in (self.items, *self.masks):
            tensor = inputs[key]
            leading, rest = mask.shape[:-1], tensor.shape[mask.dim() :]
            kept = tensor.new_zeros((len(exists), n_kept, *rest))
            kept[batch, now] = tensor.reshape(len(exists), n, *rest)[batch, place]
            gathered[key] = kept.reshape(*leading, n_kept, *rest)
        return gathered, _Rows(batch, place, now, n)


class _TemplateNetwork(InferenceBlock):
    """A network whose outputs have other names than its tensors.

    Sets of candidates are computed with no more rows than the batch has: rows that do not exist have no influence on
    the outputs.

    :param names: Name of each of the `out_keys` in the outputs.
    :param candidates: Candidates of action heads.
    """

    def __init__(
        self,
        in_keys: list[str],
        out_keys: list[str],
        in_shapes: Sequence[Sequence[int]],
        perception_blocks: Mapping[str, PerceptionBlock],
        names: Mapping[str, str],
        candidates: Mapping[str, Candidates],
    ) -> None:
        super().__init__(in_keys, out_keys, in_shapes, perception_blocks)
        self._names = dict(names)
        self._candidates = dict(candidates)

    @override(InferenceBlock)
    def forward(self, block_input: TensorDict) -> TensorDict:
        places = {}
        for head, candidates in self._candidates.items():
            if (gathered := candidates.gathered(block_input)) is not None:
                block_input, places[head] = gathered
        outputs = {self._names[key]: tensor for key, tensor in super().forward(block_input).items()}
        for head, of_rows in places.items():
            if head in outputs:
                outputs[head] = _spread(outputs[head], of_rows)
        return outputs

    @override(InferenceBlock)
    def describe_forward(self, reader: ProgramReader, inputs: Places) -> Places:
        return {self._names[key]: place for key, place in super().describe_forward(reader, inputs).items()}


def _spread(logits: torch.Tensor, rows: _Rows) -> torch.Tensor:
    """Restore the indices that the rows of logits had before gathering; the other logits are masked."""
    flat = logits.flatten(0, -2)
    spread = flat.new_full((len(flat), rows.n_before), torch.finfo(flat.dtype).min)
    spread = spread.index_put((rows.batch, rows.before), flat[rows.batch, rows.now])
    return spread.reshape(*logits.shape[:-1], rows.n_before)


def network_of(
    in_shapes: Mapping[str, Sequence[int]],
    blocks: Mapping[str, PerceptionBlock],
    outputs: Mapping[str, str],
    candidates: Mapping[str, Candidates] | None = None,
) -> InferenceBlock:
    """Build a network of blocks, whose outputs may have the names of inputs.

    :param in_shapes: Shapes of its inputs, by key.
    :param blocks: The blocks by name.
    :param outputs: Tensor of each output.
    :param candidates: Candidates of action heads, if rows that do not exist have no influence on the outputs.
    """
    arguments = (list(in_shapes), list(outputs.values()), list(in_shapes.values()), blocks)
    if not candidates and all(name == key for key, name in outputs.items()):
        return InferenceBlock(*arguments)
    names = {name: key for key, name in outputs.items()}
    return _TemplateNetwork(*arguments, names=names, candidates=candidates or {})


class ActionHeads:
    """Build the output blocks of policy and state-action value networks.

    :param distribution_mapper: Distributions of the action heads.
    :param masks: Observation with the mask of an action head, by head.
    :param items: For action heads that choose one of the items of an observation `[n, features]`, a mapping with
        `observations` (the items, and vectors that the choice depends on), `hidden_units` and `non_lin` of an
        :class:`~maze.perception.blocks.joint_blocks.set_blocks.ItemScoresBlock`. With `by_place: false` the logits are
        its scores, without a learned logit for each index, so that order and number of the items do not matter.
    :param initialization: Initialization of the layers.
    :param state_dependent_std: Whether the standard deviations of normal distributions depend on the observation.
    :param initial_std: Initial standard deviation, above 0 and in the unit of the action (before squashing).
    :raises ConfigError: An option for normal distributions is set, but there are none, or standard deviations that do
        not depend on the observation are set for an action that is not a vector.
    """

    def __init__(
        self,
        distribution_mapper: DistributionMapper,
        masks: Mapping[str, str],
        items: Mapping[str, Mapping[str, Any]],
        initialization: Initialization,
        state_dependent_std: bool = True,
        initial_std: float = 1.0,
    ) -> None:
        self._mapper = mapper = distribution_mapper
        self.masks = dict(masks)
        self.items = dict(items)
        self._initialization = initialization
        self._log_std = math.log(positive_number("model.initial_std", initial_std))
        # Heads whose logits are means and logarithms of standard deviations.
        self._gaussian = [h for h in mapper.action_heads if issubclass(mapper.distribution_class(h), _GAUSSIAN)]
        self._own_std = [] if state_dependent_std else self._gaussian
        option = "initial_std" if state_dependent_std else "state_dependent_std"
        if not self._gaussian and (initial_std != 1.0 or not state_dependent_std):
            found = {head: mapper.distribution_class(head).__name__ for head in mapper.action_heads}
            raise ConfigError(f"model.{option}: no action has a normal distribution, found {found}. Leave the default.")
        if arrays := [head for head in self._own_std if len(mapper.required_logits_shape(head)) != 1]:
            raise ConfigError(
                f"model.state_dependent_std: expected actions that are vectors, found {arrays}. Flatten them in the "
                "action conversion, or leave the option true."
            )

    def check(self, action_spaces: Mapping[Any, spaces.Dict], observation_spaces: Mapping[Any, spaces.Dict]) -> None:
        """Compare masks and items with the spaces.

        :raises ConfigError: Names the action head, and the sub-step.
        """
        for where, heads in ((_MASKS, self.masks), (_ITEMS, self.items)):
            if unknown := [head for head in heads if head not in self._mapper.action_heads]:
                raise unknown_key_error(f"{where}: action head", unknown[0], self._mapper.action_heads)
        for step_key, action_space in action_spaces.items():
            shapes = {key: tuple(sub.shape or ()) for key, sub in observation_spaces[step_key].spaces.items()}
            for head, space in action_space.spaces.items():
                if head in self.masks and self.masks[head] not in shapes:
                    where = f"{_MASKS}.{head}: observation of sub-step {step_key!r}"
                    raise unknown_key_error(where, self.masks[head], shapes)
                if head in self.masks and isinstance(space, spaces.Box):
                    raise ConfigError(f"{_MASKS}.{head}: only discrete actions can be masked, found {space}.")
                if head in self.items:
                    keys, n = self.items[head]["observations"], getattr(space, "n", None)
                    items, *vectors = [shapes.get(key, ()) for key in keys] or [()]
                    if len(items) != 2 or items[0] != n or any(len(shape) != 1 for shape in vectors):
                        raise ConfigError(
                            f"{_ITEMS}.{head}: expected the key of an observation of the shape ({n}, features), and "
                            f"those of vectors, found {keys} in sub-step {step_key!r}: {shapes}."
                        )

    def candidates(
        self, observation_keys: Collection[str], joint_observations: Mapping[str, Sequence[str]]
    ) -> dict[str, Candidates]:
        """Return the candidates of heads whose logits are scores only, with their masks.

        :param observation_keys: Observations of a network.
        :param joint_observations: See :class:`~maze.perception.builders.base.BaseModelBuilder`.
        """
        found = {}
        for head, settings in self.items.items():
            items, mask = settings["observations"][0], self.masks.get(head)
            joint = tuple(joint_observations.get(items, ()))
            if settings.get("by_place", True) or not joint or mask is None or items not in observation_keys:
                continue
            masks = dict.fromkeys([*joint, mask])
            found[head] = Candidates(items, tuple(key for key in masks if key in observation_keys))
        return found

    def blocks(
        self, action_space: spaces.Dict, perception_net: InferenceBlock, obs_shapes: Mapping[str, Sequence[int]]
    ) -> tuple[dict[str, PerceptionBlock], dict[str, str]]:
        """Build the blocks from the latent representation to the logits of all heads.

        :return: The blocks, and the name of the logits of each head.
        """
        blocks: dict[str, PerceptionBlock] = {}
        names: dict[str, str] = {}
        taken = {*perception_net.tensor_shapes(), *obs_shapes}
        for head in action_space.spaces:
            shape = tuple(self._mapper.required_logits_shape(head))
            mask = self.masks.get(head)
            stages = [head]
            if mask is not None:
                stages.insert(0, f"{head}_logits")
            if len(shape) != 1:
                stages.insert(0, f"{head}_flat_logits")
            stages = [free_name(stage, taken) for stage in stages]
            # the small initial norm gives a nearly uniform policy
            if head in self._own_std:
                latent, shapes = perception_net.out_keys[0], perception_net.out_shapes()
                means = GaussianOutputBlock(latent, stages[0], shapes, shape[0] // 2, self._log_std)
                means.mean_layer.apply(self._initialization.layers(0.01))
                blocks[stages[0]] = means
            else:
                outputs = self.output(head, stages[0], perception_net, math.prod(shape), initial_norm=0.01)
                if head in self._gaussian and self._log_std:
                    bias = np.zeros(shape, np.float32)
                    bias[..., shape[-1] // 2 :] = self._log_std
                    cast("LinearOutputBlock", outputs[stages[0]]).set_bias(bias.ravel())
                blocks |= outputs
            if len(shape) != 1:
                unflatten = partial(_unflatten, shape=shape)
                blocks[stages[1]] = FunctionalBlock(stages[0], stages[1], [(math.prod(shape),)], unflatten)
            if mask is not None:
                blocks |= self._masking(head, stages[-2:], shape, mask, tuple(obs_shapes[mask]))
            names[head] = stages[-1]
            taken |= set(blocks)
        return blocks, names

    def output(
        self, head: str, name: str, perception_net: InferenceBlock, n_units: int, initial_norm: float
    ) -> dict[str, PerceptionBlock]:
        """Build the blocks from the latent representation to one output for each choice.

        :param head: The action head.
        :param name: Name of the outputs.
        :param perception_net: Network with the latent representation and the items.
        :param n_units: Number of outputs.
        :param initial_norm: Initial norm of the weights of each output.
        """
        latent, latent_shapes = perception_net.out_keys[0], perception_net.out_shapes()
        settings = self.items.get(head)
        places = name if settings is None else f"{name}_places"
        blocks: dict[str, PerceptionBlock] = {}
        if settings is None or settings.get("by_place", True):
            block: PerceptionBlock = LinearOutputBlock(latent, places, latent_shapes, n_units)
            blocks[places] = block.apply(self._initialization.layers(initial_norm))
        if settings is not None:
            shapes = {**perception_net.tensor_shapes(), places: (n_units,)}
            names_of = (encoded_items_key, scaled_key, normalized_key)
            known_as = [(*(name_of(key) for name_of in names_of), key) for key in settings["observations"]]
            keys = [*blocks, *(next(key for key in names if key in shapes) for names in known_as), latent]
            in_shapes = [shapes[key] for key in keys]
            block = ItemScoresBlock(keys, name, in_shapes, settings["hidden_units"], settings["non_lin"])
            block.apply(self._initialization.hidden())
            block.score_layer.apply(self._initialization.layers(initial_norm))
            blocks[name] = block
        return blocks

    def _masking(
        self, head: str, names: Sequence[str], shape: tuple[int, ...], mask: str, mask_shape: tuple[int, ...]
    ) -> dict[str, PerceptionBlock]:
        """Build the blocks that mask logits.

        :param names: Names of the logits and of the masked logits.
        """
        blocks: dict[str, PerceptionBlock] = {}
        if mask_shape[1:] == shape:  # stacked observations: the mask of the last time step
            current = f"{head}_current_mask"
            blocks[current] = SliceBlock(mask, current, [mask_shape], slice_dim=-len(mask_shape), slice_idx=-1)
            mask, mask_shape = current, shape
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


def resolve_shared_keys(perception_net: InferenceBlock, shared_embedding_keys: Sequence[str]) -> list[str]:
    """Resolve the keys of shared embeddings; `latent` is the last tensor of the perception network.

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


def _unflatten(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return tensor.reshape(tensor.shape[:-1] + torch.Size(shape))
