"""Composer of models by an architecture template."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
from gymnasium import spaces

from maze.core.agent.torch_policy import TorchPolicy
from maze.core.agent.torch_state_action_critic import encoded_size, merged_action_space, q_values_key
from maze.core.annotations import override
from maze.core.env.structured_env import StepKeyType
from maze.core.errors import ConfigError, unknown_key_error
from maze.core.utils.factory import TARGET_KEY, ConfigType, Factory
from maze.perception.blocks.general.concat import ConcatenationBlock
from maze.perception.blocks.inference import InferenceBlock
from maze.perception.blocks.output.linear import LinearOutputBlock
from maze.perception.builders.base import WHERE, BaseModelBuilder, free_name
from maze.perception.models.critics import (
    BaseStateActionCriticComposer,
    CriticComposerInterface,
    SharedStateActionCriticComposer,
    SharedStateCriticComposer,
)
from maze.perception.models.model_composer import BaseModelComposer, Critic, check_keys, critic_composer_type
from maze.perception.models.template_parts import ActionHeads, Candidates, network_of, resolve_shared_keys
from maze.perception.weight_init import INITIALIZATIONS


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
        self._heads = ActionHeads(
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
        shared = resolve_shared_keys(perception_net, shared_embedding_keys)
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
        shared = resolve_shared_keys(perception_net, shared_embedding_keys or [])
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
        composer_type = critic_composer_type(self._critic_config) or CriticComposerInterface
        observed, actions = self.observation_spaces_dict, self.action_spaces_dict
        networks: dict[Any, Any] = {key: {"_target_": partial(self._value_net, key)} for key in observed}
        if issubclass(composer_type, SharedStateCriticComposer):
            networks = {0: {"_target_": self._shared_value_net}}
        elif issubclass(composer_type, BaseStateActionCriticComposer):
            if issubclass(composer_type, SharedStateActionCriticComposer):
                merged: dict[str, spaces.Space[Any]] = {}
                for space in observed.values():
                    merged = {**space.spaces, **merged}
                observed, actions = {0: spaces.Dict(merged)}, {0: merged_action_space(actions)}
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
