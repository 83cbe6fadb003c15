"""Composer of models by an architecture template, with action heads and their masks."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, cast

import numpy as np
import torch
from gymnasium import spaces

from maze.core.agent.torch_policy import TorchPolicy
from maze.core.agent.torch_state_action_critic import encoded_size, merged_action_space, q_values_key
from maze.core.annotations import override
from maze.core.env.structured_env import StepKeyType
from maze.core.errors import ConfigError, unknown_key_error
from maze.core.utils.config_utils import number
from maze.core.utils.factory import TARGET_KEY, ConfigType, Factory
from maze.distributions.distribution_mapper import DistributionMapper
from maze.distributions.gaussian import DiagonalGaussianProbabilityDistribution
from maze.distributions.squashed_gaussian import SquashedGaussianProbabilityDistribution
from maze.perception.blocks.base import PerceptionBlock
from maze.perception.blocks.general.action_masking import ActionMaskingBlock
from maze.perception.blocks.general.concat import ConcatenationBlock
from maze.perception.blocks.general.functional import FunctionalBlock
from maze.perception.blocks.general.slice import SliceBlock
from maze.perception.blocks.inference import Candidates, InferenceBlock, network_of
from maze.perception.blocks.joint_blocks.set_blocks import ItemScoresBlock
from maze.perception.blocks.output.linear import GaussianOutputBlock, LinearOutputBlock
from maze.perception.builders.base import ENCODED, NORMALIZED, SCALED, WHERE, BaseModelBuilder, free_name
from maze.perception.models import critics
from maze.perception.models.model_composer import BaseModelComposer, Critic, check_keys, critic_composer_type
from maze.perception.perception_utils import flatten_spaces
from maze.perception.weight_init import INITIALIZATIONS, Initialization

_MASKS = "model.action_masks"
_ITEMS = "model.action_items"
_GAUSSIAN = (DiagonalGaussianProbabilityDistribution, SquashedGaussianProbabilityDistribution)


class TemplateModelComposer(BaseModelComposer):
    """Build the networks of all sub-steps from their spaces, by the template of a model builder.

    `networks` in the configuration of a part (`policy`, `critic`) replace those of the template.

    :param action_spaces_dict: Action spaces by step key.
    :param observation_spaces_dict: Observation spaces by step key.
    :param agent_counts_dict: Number of agents by step key; -1: it changes.
    :param distribution_mapper_config: Distributions that differ from the defaults.
    :param model_builder: A model builder, or its configuration.
    :param policy: A policy composer, or its configuration; `None`: there is no policy.
    :param critic: A critic composer, or its configuration; `None`: there is no critic.
    :param action_masks: Observation with the mask of an action head, by head: positive for valid actions, zero for
        others. It is not a feature of the networks unless it is also mapped to a modality.
    :param action_items: For `Discrete` action heads that choose one of the items of an observation `[n, features]`:
        `observations` (the items, and further vectors that the choice depends on), `hidden_units` and `non_lin` of the
        layers that score each item; `by_place: false` if the logits are these scores only.
    :param initialization: Initial weights of linear and convolution layers: `normc`, random directions of length 1, or
        `orthogonal`, orthogonal ones of length sqrt(2), as is usual for PPO. The weights of policy outputs have length
        0.01, those of values 1.
    :param state_dependent_std: Whether the standard deviations of (squashed) Gaussian action heads depend on the
        observation; otherwise each component of an action has one learned parameter.
    :param initial_std: Initial standard deviation, above 0 and in the unit of the action (before squashing). With
        bounds [-1, 1], about 0.4 keeps most initial actions within them (Andrychowicz et al. 2021, What matters for
        on-policy deep actor-critic methods, found 0.5 to be best).
    """

    def __init__(
        self,
        action_spaces_dict: dict[StepKeyType, spaces.Dict],
        observation_spaces_dict: dict[StepKeyType, spaces.Dict],
        agent_counts_dict: dict[StepKeyType, int],
        distribution_mapper_config: ConfigType,
        model_builder: ConfigType | type[BaseModelBuilder],
        policy: ConfigType,
        critic: ConfigType,
        action_masks: Mapping[str, str] | None = None,
        action_items: Mapping[str, Mapping[str, Any]] | None = None,
        initialization: str = "normc",
        state_dependent_std: bool = True,
        initial_std: float = 1.0,
    ) -> None:
        super().__init__(action_spaces_dict, observation_spaces_dict, agent_counts_dict, distribution_mapper_config)
        self._policy_config = policy
        self._critic_config = critic
        self.model_builder: BaseModelBuilder = Factory(BaseModelBuilder).instantiate(  # type: ignore[type-abstract]
            model_builder, config_path=WHERE
        )
        if initialization not in INITIALIZATIONS:
            raise unknown_key_error("model.initialization", initialization, INITIALIZATIONS)
        self._initialization = INITIALIZATIONS[initialization]
        self._heads = _ActionHeads(
            self.distribution_mapper,
            action_masks or {},
            action_items or {},
            self._initialization,
            state_dependent_std,
            initial_std,
        )
        self._heads.check(action_spaces_dict, observation_spaces_dict)
        self.model_builder.check_observations(map(self._features, observation_spaces_dict.values()))
        self.model_builder.init_shared_embedding_keys(action_spaces_dict)

    @classmethod
    @override(BaseModelComposer)
    def check_model_config(cls, model_config: ConfigType) -> None:
        check_keys(cls, model_config, dict.fromkeys(("model_builder", "policy", "critic"), (TARGET_KEY,)))
        if isinstance(model_config, Mapping) and model_config.get("model_builder") is None:
            raise ConfigError(
                f"{WHERE}: missing. Name a template, e.g. `_target_: maze.perception.builders.ConcatModelBuilder`."
            )

    # -- networks -----------------------------------------------------------------------------------------------------

    def template_perception_net(self, observation_space: spaces.Dict) -> InferenceBlock:
        """Build a perception network with new weights.

        :param observation_space: Observations of one sub-step.
        """
        perception_net = self.model_builder.from_observation_space(self._features(observation_space))
        shapes = dict(zip(perception_net.out_keys, perception_net.out_shapes(), strict=True))
        if len(shapes) != 1 or any(len(shape) != 1 for shape in shapes.values()):
            raise ConfigError(
                f"{WHERE}: the outputs of policy and critic need one latent vector, but the perception network returns "
                f"{shapes}. End with a block that returns a vector, such as LSTMLastStepBlock as recurrence."
            )
        perception_net.apply(self._initialization.hidden())
        return perception_net

    def template_policy_net(
        self, observation_space: spaces.Dict, action_space: spaces.Dict, shared_embedding_keys: list[str]
    ) -> tuple[InferenceBlock, InferenceBlock]:
        """Build the policy network of one sub-step.

        :param observation_space: Its observations.
        :param action_space: Its action heads.
        :param shared_embedding_keys: Tensors that the network returns next to the logits.
        :return: The network, and its perception part (the same modules).
        """
        perception_net = self.template_perception_net(observation_space)
        shapes = {key: tuple(space.shape or ()) for key, space in observation_space.spaces.items()}
        head_blocks, names = self._heads.blocks(action_space, perception_net, shapes)
        shared = _resolve_shared_keys(perception_net, shared_embedding_keys)
        in_keys = [*perception_net.in_keys]
        masks = dict.fromkeys(mask for head, mask in self._heads.masks.items() if head in action_space.spaces)
        in_keys += [key for key in masks if key not in in_keys]
        if clash := [key for key in shared if key in names]:
            raise ConfigError(f"{WHERE}.shared_embedding_keys: {clash} are action heads as well; rename the actions.")
        outputs = {**names, **{key: key for key in shared}}
        in_shapes = {key: shapes[key] for key in in_keys}
        blocks = {**perception_net.perception_blocks, **head_blocks}
        return network_of(in_shapes, blocks, outputs, self._candidates(in_keys, shared)), perception_net

    def template_value_net(
        self,
        observation_space: spaces.Dict | None,
        shared_embedding_keys: list[str] | None = None,
        perception_net: InferenceBlock | None = None,
    ) -> InferenceBlock:
        """Build a network that returns `value`.

        :param observation_space: Its observations; not needed with `perception_net`.
        :param shared_embedding_keys: Tensors that the network takes as inputs instead of computing them.
        :param perception_net: Perception network to use, together with its weights; `None`: a new one.
        """
        perception_net = perception_net or self._new_perception_net(observation_space)
        latent = perception_net.out_keys[0]
        name = free_name("value", perception_net.tensor_shapes())
        head = LinearOutputBlock(latent, name, perception_net.out_shapes(), output_units=1)
        head.apply(self._initialization.layers(1.0))
        shared = _resolve_shared_keys(perception_net, shared_embedding_keys or [])
        shapes = perception_net.tensor_shapes()
        keys = list(dict.fromkeys([*shared, *perception_net.in_keys]))
        rest = InferenceBlock(
            keys, perception_net.out_keys, [shapes[key] for key in keys], perception_net.perception_blocks
        )
        in_shapes = {key: shapes[key] for key in rest.used_in_keys}
        blocks = {**rest.perception_blocks, name: head}
        return network_of(in_shapes, blocks, {"value": name}, self._candidates(in_shapes, shared))

    def template_q_value_net(
        self,
        observation_space: spaces.Dict | None,
        action_space: spaces.Dict,
        only_discrete_spaces: bool,
        perception_net: InferenceBlock | None = None,
    ) -> InferenceBlock:
        """Build a network of state-action values, see :mod:`maze.core.agent.torch_state_action_critic`.

        Actions as inputs are concatenated with the latent representation and processed by another `hidden` stage.

        :param observation_space: Its observations; not needed with `perception_net`.
        :param action_space: Action heads that it values.
        :param only_discrete_spaces: Return the values of all actions of each head instead of taking actions as inputs.
        :param perception_net: Perception network to use, together with its weights; `None`: a new one.
        :raises ConfigError: The model has no stage `hidden`, or an action has the name of a tensor of the network.
        """
        perception_net = perception_net or self._new_perception_net(observation_space)
        blocks, latent = dict(perception_net.perception_blocks), perception_net.out_keys[0]
        in_shapes = dict(zip(perception_net.in_keys, perception_net.in_shapes, strict=True))
        sizes = {head: encoded_size(space, head) for head, space in action_space.spaces.items()}
        if not only_discrete_spaces:
            if not self.model_builder.has_stage("hidden"):
                raise ConfigError(
                    f"{WHERE}.modality_config.hidden: empty, but the critic's networks need it to process the latent "
                    f"representation together with the actions {list(sizes)}. Add a block, such as a DenseBlock."
                )
            actions = {head: (size,) for head, size in sizes.items()}
            keys, shapes = [latent, *actions], [*perception_net.out_shapes(), *actions.values()]
            taken = {*perception_net.tensor_shapes(), *actions}
            if clash := [action for action in actions if action in perception_net.tensor_shapes()]:
                raise ConfigError(
                    f"model.critic: {clash} are names of actions and of tensors of the networks. Rename the "
                    "actions in the action conversion."
                )
            in_shapes |= actions
            concat, hidden, q_value = (free_name(n, taken) for n in ("concat_action", "hidden_action", "q_value"))
            joint = blocks[concat] = ConcatenationBlock(keys, concat, shapes, concat_dim=-1)
            block = self.model_builder.build_block("hidden", concat, hidden, joint.out_shapes())
            blocks[hidden] = block.apply(self._initialization.hidden())
            head = LinearOutputBlock(hidden, q_value, block.out_shapes(), 1)
            blocks[q_value] = head.apply(self._initialization.layers(0.1))
            return network_of(in_shapes, blocks, {"q_value": q_value})
        outputs = {}
        for action, n_units in sizes.items():
            key = q_values_key(action)
            outputs[key] = free_name(key, perception_net.tensor_shapes())
            blocks |= self._heads.output(action, outputs[key], perception_net, n_units, initial_norm=0.1)
        return network_of(in_shapes, blocks, outputs)

    # -- policy and critic --------------------------------------------------------------------------------------------

    @cached_property
    @override(BaseModelComposer)
    def policy(self) -> TorchPolicy | None:
        networks = {key: {"_target_": partial(self._policy_net, key)} for key in self.action_spaces_dict}
        return self._compose_policy(self._policy_config, networks=networks)

    @cached_property
    @override(BaseModelComposer)
    def critic(self) -> Critic | None:
        if self._critic_config is None:
            return None
        composer_type = critic_composer_type(self._critic_config) or critics.CriticComposerInterface
        observed, actions = self.observation_spaces_dict, self.action_spaces_dict
        networks: dict[Any, Any] = {key: {"_target_": partial(self._value_net, key)} for key in observed}
        if issubclass(composer_type, critics.SharedStateCriticComposer):
            networks = {0: {"_target_": self._shared_value_net}}
        elif issubclass(composer_type, critics.BaseStateActionCriticComposer):
            if issubclass(composer_type, critics.SharedStateActionCriticComposer):
                merged = spaces.Dict(flatten_spaces(space.spaces for space in observed.values()))
                observed, actions = {0: merged}, {0: merged_action_space(actions)}
            networks = {key: {"_target_": partial(self._q_value_net, observed[key], actions[key])} for key in observed}
        return self._compose_critic(self._critic_config, self.observation_spaces_dict, networks=networks)

    # Composers of policies and critics call these with the arguments of networks.

    def _policy_net(self, step_key: StepKeyType, obs_shapes: Any, action_logits_shapes: Any) -> InferenceBlock:
        shared = self.model_builder.shared_embedding_keys[step_key]
        observation_space = self.observation_spaces_dict[step_key]
        return self.template_policy_net(observation_space, self.action_spaces_dict[step_key], shared)[0]

    def _value_net(self, step_key: StepKeyType, obs_shapes: Any) -> InferenceBlock:
        shared = self.model_builder.shared_embedding_keys[step_key]
        return self.template_value_net(self.observation_spaces_dict[step_key], shared)

    def _shared_value_net(self, obs_shapes: Mapping[str, Sequence[int]]) -> InferenceBlock:
        shared = list(dict.fromkeys(key for keys in self.model_builder.shared_embedding_keys.values() for key in keys))
        counts = self.agent_counts_dict
        if shared and [counts.get(key) for key in self.action_spaces_dict] != [1]:
            raise ConfigError(
                f"{WHERE}.shared_embedding_keys: a shared critic has one network for all sub-steps and agents, which "
                f"cannot take the embeddings of several policy networks ({shared}). Use "
                "maze.perception.models.critics.StateCriticComposer, or share no embeddings."
            )
        boxes: dict[str, spaces.Space[Any]] = {
            key: spaces.Box(-np.inf, np.inf, tuple(shape), np.float32) for key, shape in obs_shapes.items()
        }
        return self.template_value_net(spaces.Dict(boxes), shared)

    def _q_value_net(
        self, observation_space: spaces.Dict, action_space: spaces.Dict, obs_shapes: Any, q_value_shapes: Any
    ) -> InferenceBlock:
        return self.template_q_value_net(observation_space, action_space, "q_value" not in q_value_shapes)

    def _candidates(self, in_keys: Collection[str], shared_embedding_keys: Sequence[str]) -> dict[str, Candidates]:
        """Return the candidates of action heads; none with shared embeddings, which may have a row for each of them."""
        if shared_embedding_keys:
            return {}
        return self._heads.candidates(in_keys, self.model_builder.joint_observations)

    def _new_perception_net(self, observation_space: spaces.Dict | None) -> InferenceBlock:
        if observation_space is None:
            raise ConfigError("A template network needs an `observation_space` or a `perception_net`; both are None.")
        return self.template_perception_net(observation_space)

    def _features(self, observation_space: spaces.Dict) -> spaces.Dict:
        """Return the observations of the perception part: all but the masks that have no modality."""
        masks = self._heads.masks.values()
        joined = self.model_builder.joint_observations.values()
        mapped = {*self.model_builder.observation_modality_mapping, *(key for others in joined for key in others)}
        return spaces.Dict(
            {key: space for key, space in observation_space.spaces.items() if key in mapped or key not in masks}
        )


class _ActionHeads:
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
        self._log_std = math.log(number("model.initial_std", initial_std, 0.0, above=True))
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
                of_choices = mask if mask is not None and tuple(obs_shapes[mask]) == shape else None
                outputs = self.output(head, stages[0], perception_net, math.prod(shape), 0.01, of_choices)
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
        self,
        head: str,
        name: str,
        perception_net: InferenceBlock,
        n_units: int,
        initial_norm: float,
        mask: str | None = None,
    ) -> dict[str, PerceptionBlock]:
        """Build the blocks from the latent representation to one output for each choice.

        :param head: The action head.
        :param name: Name of the outputs.
        :param perception_net: Network with the latent representation and the items.
        :param n_units: Number of outputs.
        :param initial_norm: Initial norm of the weights of each output.
        :param mask: Mask of the choices, if there is one: invalid choices are not scored.
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
            known_as = [[key + end for end in (ENCODED, SCALED, NORMALIZED, "")] for key in settings["observations"]]
            keys = [*blocks, *(next(key for key in names if key in shapes) for names in known_as), latent]
            in_shapes = [*(shapes[key] for key in keys), *([(n_units,)] if mask else [])]
            keys, layers = [*keys, *([mask] if mask else [])], (settings["hidden_units"], settings["non_lin"])
            block = ItemScoresBlock(keys, name, in_shapes, *layers, has_mask=mask is not None)
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


def _resolve_shared_keys(perception_net: InferenceBlock, shared_embedding_keys: Sequence[str]) -> list[str]:
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
