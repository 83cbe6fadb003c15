"""Networks of a Maze model as RLlib's modules: policy gradient algorithms."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from ray.rllib.core.columns import Columns
from ray.rllib.core.learner.utils import make_target_network
from ray.rllib.core.rl_module.apis import (
    TARGET_NETWORK_ACTION_DIST_INPUTS,
    InferenceOnlyAPI,
    TargetNetworkAPI,
    ValueFunctionAPI,
)
from ray.rllib.core.rl_module.torch import TorchRLModule
from torch import nn

from maze.core.agent.networks import as_float_tensors
from maze.core.agent.torch_policy import TorchPolicy
from maze.core.agent.torch_state_critic import TorchStateCritic, TorchStepStateCritic
from maze.core.annotations import override
from maze.core.errors import ConfigError, MazeError, NonFiniteError
from maze.core.utils.factory import Factory
from maze.perception.models.model_composer import BaseModelComposer, Critic
from maze.perception.models.network_factory import embedding_spaces
from maze.rllib.action_distribution import action_distribution_class

MODEL_KEY = "maze"
"""Where RLlib's `model_config` holds the :class:`ModuleConfig`."""


@dataclass(frozen=True)
class ModuleConfig:
    """What a module is built from, in any process.

    :param model: Configuration of the model (plain data).
    :param spaces_dicts: `action_spaces_dict`, `observation_spaces_dict` and `agent_counts_dict`.
    :param network_key: Key of the policy network: a step key, or `(step_key, agent_id)`.
    :param only_head: The single action head that RLlib sees without a dictionary around it; `None`: dictionaries.
    :param options: Hyperparameters that the module needs to know.
    """

    model: Mapping[str, Any]
    spaces_dicts: Mapping[str, Any]
    network_key: Any
    only_head: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def step_key(self) -> Any:
        return self.network_key[0] if isinstance(self.network_key, tuple) else self.network_key

    def composer(self) -> BaseModelComposer:
        """Builds policy and critic, with new weights."""
        return Factory(BaseModelComposer).instantiate(  # type: ignore[type-abstract]  # a subclass
            self.model, config_path="model", **self.spaces_dicts
        )


class MazeRLModule(TorchRLModule):
    """Base of the modules: holds a Maze policy, of which it trains one network."""

    algorithm = "RLlib"

    @override(TorchRLModule)
    def setup(self) -> None:
        self.maze_config: ModuleConfig = self.model_config[MODEL_KEY]
        composer = self.maze_config.composer()
        policy = composer.policy
        if policy is None:
            raise ConfigError("model.policy: missing; choose a model, for instance model=flatten_concat.")
        if policy.is_recurrent:
            raise ConfigError(
                "model: with RLlib, networks of Maze cannot carry hidden states from step to step. Use `runner=dev` or "
                "`local` and PPO, or `model.recurrence=true` with stacked observations."
            )
        self.policy = policy
        self.step_action_space: spaces.Dict = composer.action_spaces_dict[self.maze_config.step_key]
        self.action_dist_cls = action_distribution_class(
            composer.distribution_mapper, self.step_action_space, self.maze_config.only_head
        )
        self.layout = self.action_dist_cls.layout
        self.take_critic(composer.critic, composer)
        for name, network in self.parts(policy, composer.critic, self.maze_config.network_key).items():
            setattr(self, name, network)

    @staticmethod
    def parts(policy: TorchPolicy, critic: Critic | None, network_key: Any) -> dict[str, nn.Module]:
        """The networks of a model that the module trains, by the module's attributes."""
        raise NotImplementedError

    def take_critic(self, critic: Critic | None, composer: BaseModelComposer) -> None:
        """Checks and keeps what the algorithm needs of the critic."""

    @property
    def policy_part(self) -> nn.Module:
        """The policy network."""
        network: nn.Module = self.policy_net
        return network

    def float_observations(self, observations: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """The network's inputs, on the device of its parameters.

        :param observations: Tensors or arrays `[batch, ...]` by key.
        """
        parameter = next(self.policy_part.parameters(), None)
        device = "cpu" if parameter is None else str(parameter.device)
        return as_float_tensors(observations, device)

    def policy_outputs(
        self, observations: Mapping[str, Any], network: nn.Module | None = None
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Joined logits `[B, n]`, and what else the policy network returns: embeddings shared with the critic."""
        outputs = (network or self.policy_part)(self.float_observations(observations))
        heads = self.layout.shapes
        embeddings = {name: tensor for name, tensor in outputs.items() if name not in heads}
        return self.layout.join(outputs), embeddings


class PolicyGradientModule(MazeRLModule, InferenceOnlyAPI, ValueFunctionAPI):
    """Policy network and state critic, for PPO and IMPALA."""

    algorithm = "PPO, APPO and IMPALA"

    @staticmethod
    @override(MazeRLModule)
    def parts(policy: TorchPolicy, critic: Critic | None, network_key: Any) -> dict[str, nn.Module]:
        assert isinstance(critic, TorchStateCritic)
        return {
            "policy_net": policy.networks[network_key],
            "critic_net": critic.networks[_critic_key(critic, network_key)],
        }

    @override(MazeRLModule)
    def take_critic(self, critic: Critic | None, composer: BaseModelComposer) -> None:
        self.critic = checked_state_critic(critic, composer)
        self.critic_key = _critic_key(self.critic, self.maze_config.network_key)
        embeddings = embedding_spaces(self.policy, composer.observation_spaces_dict)
        self.shares_embeddings = bool(embeddings[self.maze_config.step_key])

    @override(TorchRLModule)
    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {Columns.ACTION_DIST_INPUTS: self.policy_outputs(batch[Columns.OBS])[0]}

    @override(TorchRLModule)
    def _forward_train(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        logits, embeddings = self.policy_outputs(batch[Columns.OBS])
        outputs: dict[str, Any] = {Columns.ACTION_DIST_INPUTS: logits}
        if embeddings:
            outputs[Columns.EMBEDDINGS] = embeddings
        return outputs

    @override(ValueFunctionAPI)
    def compute_values(self, batch: dict[str, Any], embeddings: Any = None) -> torch.Tensor:
        """Values `[B]`; embeddings that the critic shares are computed where they are not given."""
        inputs = self.float_observations(batch[Columns.OBS])
        if self.shares_embeddings:
            inputs = {**inputs, **(embeddings if embeddings is not None else self.policy_outputs(inputs)[1])}
        device = str(next(iter(inputs.values())).device)
        if self.critic.device != device:
            self.critic.to(device)
        value: Any = self.critic.predict_value(inputs, self.critic_key)
        values: torch.Tensor = value["value"] if isinstance(value, dict) else value
        return values

    @override(InferenceOnlyAPI)
    def get_non_inference_attributes(self) -> list[str]:
        return ["critic_net"]


class PolicyTarget(TargetNetworkAPI):
    """Gives a module a second policy network, which follows the first one later."""

    policy_net: nn.Module
    target_policy_net: nn.Module

    @override(TargetNetworkAPI)
    def make_target_networks(self) -> None:
        self.target_policy_net = make_target_network(self.policy_net)

    @override(TargetNetworkAPI)
    def get_target_network_pairs(self) -> list[tuple[nn.Module, nn.Module]]:
        return [(self.policy_net, self.target_policy_net)]


class TargetPolicyModule(PolicyGradientModule, PolicyTarget):
    """The same with a policy network that follows later, for APPO, whose learner never starts without one."""

    @override(TargetNetworkAPI)
    def forward_target(self, batch: dict[str, Any]) -> dict[str, Any]:
        with torch.no_grad():
            logits = self.policy_outputs(batch[Columns.OBS], self.target_policy_net)[0]
        return {TARGET_NETWORK_ACTION_DIST_INPUTS: logits}

    @override(InferenceOnlyAPI)
    def get_non_inference_attributes(self) -> list[str]:
        return [*super().get_non_inference_attributes(), "target_policy_net"]


def checked_state_critic(critic: Critic | None, composer: BaseModelComposer) -> TorchStateCritic:
    """The critic, if it values each actor's observations by themselves.

    :raises ConfigError: There is none, or it does not.
    """
    if not isinstance(critic, TorchStateCritic):
        found = "none" if critic is None else f"a {type(critic).__name__}"
        raise ConfigError(
            f"model.critic: PPO, APPO and IMPALA need a state critic, found {found}. Choose one with "
            "`critic=flatten_concat_shared` or `critic=template_state`."
        )
    several = len(composer.action_spaces_dict) > 1 or any(n != 1 for n in composer.agent_counts_dict.values())
    if several and not isinstance(critic, TorchStepStateCritic):
        raise ConfigError(
            f"model.critic: RLlib asks for values actor by actor, and a {type(critic).__name__} looks at all "
            "sub-steps of an environment step together. Choose `critic=flatten_concat_step`."
        )
    return critic


def _critic_key(critic: TorchStateCritic, network_key: Any) -> Any:
    if len(critic.networks) == 1:
        return next(iter(critic.networks))
    return network_key[0] if isinstance(network_key, tuple) else network_key


Parts = Mapping[str, nn.Module]
"""Networks by the attribute of the module that trains them."""


def to_module_state(parts: Parts, state: Mapping[str, Any], targets: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """A module's state with the weights of a Maze model.

    :param parts: Networks of the model.
    :param state: The module's own state, as NumPy arrays; what is not in the model stays as it is.
    :param targets: Pairs of a network and the target network that begins as its copy, by their attributes.
    """
    changed = dict(state)
    for name, network in parts.items():
        for key, tensor in network.state_dict().items():
            full_key = f"{name}.{key}"
            if full_key in changed:
                changed[full_key] = tensor.detach().cpu().numpy().copy()
    for name, target in targets:
        prefix = f"{name}."
        copies = {f"{target}.{key[len(prefix) :]}": value for key, value in changed.items() if key.startswith(prefix)}
        changed.update({key: np.array(value) for key, value in copies.items() if key in changed})
    return changed


TARGETS = (("policy_net", "target_policy_net"), ("qf", "target_qf"), ("qf_twin", "target_qf_twin"))
"""Pairs of a network and the one that follows it later, by their attributes."""


def buffer_state(parts: Parts, state: Mapping[str, Any]) -> dict[str, Any]:
    """What is not trained of a Maze model, such as statistics of observations, as a part of a module's state.

    :param parts: Networks of the model.
    :param state: The module's own state, as NumPy arrays.
    """
    changed = to_module_state(parts, state, TARGETS)
    followers = dict(TARGETS)
    names = [
        f"{prefix}.{name}"
        for part, network in parts.items()
        for name, _ in network.named_buffers()
        for prefix in (part, followers.get(part, part))
    ]
    return {name: changed[name] for name in names if name in changed}


def load_into_runner(buffers: Mapping[str, Mapping[str, Any]], env_runner: Any) -> None:
    """Gives the modules of an env runner a part of their state; runs in its process.

    RLlib itself takes no weights of an update that the runner knows already.

    :param buffers: The parts by module.
    :param env_runner: The env runner.
    """
    from ray.rllib.core.rl_module.multi_rl_module import MultiRLModule

    if env_runner.module is None:  # a runner without environments
        return
    for module, part in buffers.items():
        found = env_runner.module[module] if isinstance(env_runner.module, MultiRLModule) else env_runner.module
        own = found.state_dict()
        tensors = {name: torch.as_tensor(np.array(value)) for name, value in part.items() if name in own}
        found.load_state_dict(tensors, strict=False)


def load_module_state(parts: Parts, state: Mapping[str, Any], where: str) -> None:
    """Gives the networks of a Maze model, in place, the weights of an RLlib module.

    :param parts: Networks of the model.
    :param state: The module's state, as NumPy arrays.
    :param where: The module, for messages.
    :raises MazeError: The module has other weights; the model is left as it was.
    """
    loaded: list[tuple[nn.Module, dict[str, torch.Tensor]]] = []
    for name, network in parts.items():
        weights = {}
        for key, tensor in network.state_dict().items():
            found = state.get(f"{name}.{key}")
            if found is None:
                raise MazeError(f"RLlib's module {where} has no weights `{name}.{key}`; found {sorted(state)[:6]} ...")
            weights[key] = torch.as_tensor(np.array(found), dtype=tensor.dtype)
        loaded.append((network, weights))
    for network, weights in loaded:
        network.load_state_dict(weights)


def require_finite(weights: Mapping[str, Mapping[str, Any]], when: str) -> None:
    """Refuses weights that are NaN or infinite; RLlib itself trains on with them.

    :param weights: States of all modules.
    :param when: For the message.
    :raises NonFiniteError: Names module and weights.
    """
    for module, state in weights.items():
        for name, value in state.items():
            array = np.asarray(value)
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise NonFiniteError(
                    f"{when}: the weights `{name}` of RLlib's module {module} are not finite. Look at rewards and "
                    "observations of the environment, or reduce algorithm.config.lr. The best policy so far is kept."
                )
