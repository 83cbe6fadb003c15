"""Networks and action distributions of a Maze model as RLlib's modules."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from ray.rllib.algorithms.dqn.default_dqn_rl_module import QF_NEXT_PREDS, QF_PREDS, QF_TARGET_NEXT_PREDS
from ray.rllib.algorithms.sac import sac_learner
from ray.rllib.core.columns import Columns
from ray.rllib.core.distribution.distribution import Distribution
from ray.rllib.core.learner.utils import make_target_network
from ray.rllib.core.rl_module import apis
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModule
from ray.rllib.core.rl_module.torch import TorchRLModule
from ray.rllib.utils.schedules.scheduler import Scheduler
from ray.rllib.utils.torch_utils import convert_to_torch_tensor
from torch import nn

from maze.core.agent.torch_model import as_float_tensors
from maze.core.agent.torch_state_action_critic import (
    TorchStateActionCritic,
    encode_action,
    masked_log_probs,
    q_values_key,
)
from maze.core.agent.torch_state_critic import TorchStateCritic, TorchStepStateCritic
from maze.core.annotations import override
from maze.core.errors import ConfigError, NonFiniteError
from maze.core.utils.factory import Factory
from maze.distributions.dict import DictProbabilityDistribution
from maze.distributions.distribution_mapper import DistributionMapper
from maze.distributions.numpy_distributions import check_logits
from maze.perception.builders.base import embedding_spaces
from maze.perception.models.model_composer import BaseModelComposer
from maze.rllib.environment import step_key_of

MODEL_KEY = "maze"
"""Key of the :class:`ModuleConfig` in RLlib's `model_config`."""


@dataclass(frozen=True)
class ModuleConfig:
    """Configuration of a module in any process.

    :param model: Configuration of the model (plain data).
    :param spaces_dicts: `action_spaces_dict`, `observation_spaces_dict` and `agent_counts_dict`.
    :param network_key: Key of the policy network: a step key, or `(step_key, agent_id)`.
    :param only_head: The single action head that RLlib uses without a dictionary; `None`: dictionaries.
    :param options: Hyperparameters of the module.
    :param shared: The model whose networks the module trains; `None`: a model of its own, with new weights.
    """

    model: Mapping[str, Any]
    spaces_dicts: Mapping[str, Any]
    network_key: Any
    only_head: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    shared: BaseModelComposer | None = None

    def composer(self) -> BaseModelComposer:
        """Return the shared model, or build one."""
        return self.shared or Factory(BaseModelComposer).instantiate(  # type: ignore[type-abstract]  # a subclass
            self.model, config_path="model", **self.spaces_dicts
        )


class MazeActionDistribution(Distribution):
    """The joint distribution over the action heads of a sub-step.

    Log-probabilities, entropies and divergences are those of the joint action, one for each row. Use
    :func:`action_distribution_class` to make a subclass for an action space.

    :param logits: `[..., n_logits]`
    :param is_deterministic: Whether :meth:`sample` returns the deterministic action.
    """

    mapper: DistributionMapper
    shapes: Mapping[str, tuple[int, ...]]
    """Shapes of the logits by head, in the order in which one tensor holds them, as RLlib requires."""
    only_head: str | None
    """The head whose actions are used without a dictionary; `None`: dictionaries."""

    def __init__(self, logits: torch.Tensor, is_deterministic: bool = False) -> None:
        super().__init__()
        self.logits = logits
        self.is_deterministic = is_deterministic

    @cached_property
    def joint(self) -> DictProbabilityDistribution:
        """Maze's distribution."""
        return self.mapper.logits_dict_to_distribution(self.split(self.logits), temperature=1.0)

    @classmethod
    def join(cls, logits: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Join the logits by head to one tensor `[..., n_logits]`."""
        flat = [logits[head].flatten(-len(shape)) for head, shape in cls.shapes.items()]
        return torch.cat(flat, dim=-1) if len(flat) > 1 else flat[0]

    @classmethod
    def split(cls, joined: torch.Tensor) -> dict[str, torch.Tensor]:
        """Split joined logits by head."""
        parts = torch.split(joined, [math.prod(shape) for shape in cls.shapes.values()], dim=-1)
        shapes = zip(cls.shapes.items(), parts, strict=True)
        return {head: part.reshape(*part.shape[:-1], *shape) for (head, shape), part in shapes}

    @override(Distribution)
    def sample(self, *, sample_shape: tuple[int, ...] | None = None, **kwargs: Any) -> Any:
        """Sample actions, without gradients.

        :raises EnvironmentContractError: All actions of a head are masked.
        :raises NonFiniteError: A logit is NaN or infinite.
        """
        for head, logits in self.split(self.logits).items():
            check_logits(logits.detach().cpu().numpy(), self.mapper.choice_sizes(head), head, "model.policy")
        actions = self.joint.deterministic_sample() if self.is_deterministic else self.joint.sample()
        # Copies: a squashed distribution recognises its own samples, also where tanh is saturated. The learner gets
        # only the actions, and the probability ratio has to be 1 before the first update.
        return self._given({head: action.clone() for head, action in actions.items()})

    @override(Distribution)
    def rsample(self, *, sample_shape: tuple[int, ...] | None = None, **kwargs: Any) -> Any:
        """Sample actions with gradients; all heads have to be reparameterisable."""
        parts: dict[str, Any] = self.joint.distribution_dict
        return self._given({head: distribution.rsample() for head, distribution in parts.items()})

    @override(Distribution)
    def logp(self, value: Any, **kwargs: Any) -> torch.Tensor:
        return self.joint.joint_log_prob({self.only_head: value} if self.only_head is not None else value)

    @override(Distribution)
    def entropy(self, **kwargs: Any) -> torch.Tensor:
        return self.joint.joint_entropy()

    @override(Distribution)
    def kl(self, other: MazeActionDistribution, **kwargs: Any) -> torch.Tensor:
        return self.joint.joint_kl(other.joint)

    @staticmethod
    @override(Distribution)
    def required_input_dim(space: spaces.Space[Any], **kwargs: Any) -> int:
        raise NotImplementedError("The number of logits depends on the distribution mapper of the model.")

    @classmethod
    @override(Distribution)
    def from_logits(cls, logits: torch.Tensor, **kwargs: Any) -> MazeActionDistribution:
        return cls(logits)

    @override(Distribution)
    def to_deterministic(self) -> MazeActionDistribution:
        return type(self)(self.logits, is_deterministic=True)

    def _given(self, actions: dict[str, torch.Tensor]) -> Any:
        return actions[self.only_head] if self.only_head is not None else actions


def action_distribution_class(
    mapper: DistributionMapper, action_space: spaces.Dict, only_head: str | None = None
) -> type[MazeActionDistribution]:
    """Build the distribution class for the actions of a sub-step.

    :param mapper: Distribution mapper of the model.
    :param action_space: The heads.
    :param only_head: Name of the single head whose action RLlib uses without a dictionary.
    """
    shapes = {head: tuple(mapper.required_logits_shape(head)) for head in action_space.spaces}
    attributes = {"mapper": mapper, "shapes": shapes, "only_head": only_head}
    return type("BoundMazeActionDistribution", (MazeActionDistribution,), attributes)


class MazeRLModule(TorchRLModule):
    """Base of the modules: holds a Maze policy and trains one of its networks."""

    @override(TorchRLModule)
    def setup(self) -> None:
        self.maze_config: ModuleConfig = self.model_config[MODEL_KEY]
        composer = self.maze_config.composer()
        if (policy := composer.policy) is None:
            raise ConfigError("model.policy: missing; choose a model, for instance model=flatten_concat.")
        if policy.is_recurrent:
            raise ConfigError(
                "model: with RLlib, networks of Maze cannot carry hidden states from step to step. Use `runner=dev` or "
                "`local` and PPO, or `model.recurrence=true` with stacked observations."
            )
        self.policy = policy
        self.step_key = step_key_of(self.maze_config.network_key)
        self.step_action_space: spaces.Dict = composer.action_spaces_dict[self.step_key]
        self.action_dist_cls = action_distribution_class(
            composer.distribution_mapper, self.step_action_space, self.maze_config.only_head
        )
        self.take_networks(policy.networks[self.maze_config.network_key], composer)

    def take_networks(self, policy_net: nn.Module, composer: BaseModelComposer) -> None:
        """Store the networks that the module trains as its attributes.

        :param policy_net: The policy network.
        :param composer: The model, with its critic.
        :raises ConfigError: The algorithm needs another critic.
        """
        self.policy_net = policy_net

    def float_observations(self, observations: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return the network's inputs, on the device of its parameters.

        :param observations: Tensors or arrays `[batch, ...]` by key.
        """
        return as_float_tensors(observations, str(next(self.policy_net.parameters()).device))

    def policy_outputs(
        self, observations: Mapping[str, Any], network: nn.Module | None = None
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return joined logits `[B, n]`, and the embeddings that the policy network shares with the critic."""
        outputs = (network or self.policy_net)(self.float_observations(observations))
        embeddings = {name: tensor for name, tensor in outputs.items() if name not in self.action_dist_cls.shapes}
        return self.action_dist_cls.join(outputs), embeddings

    @override(TorchRLModule)
    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {Columns.ACTION_DIST_INPUTS: self.policy_outputs(batch[Columns.OBS])[0]}


class PolicyGradientModule(MazeRLModule, apis.InferenceOnlyAPI, apis.ValueFunctionAPI):
    """Policy network and state critic, for PPO and IMPALA."""

    @override(MazeRLModule)
    def take_networks(self, policy_net: nn.Module, composer: BaseModelComposer) -> None:
        super().take_networks(policy_net, composer)
        critic = composer.critic
        if not isinstance(critic, TorchStateCritic):
            raise ConfigError(
                f"model.critic: PPO, APPO and IMPALA need a state critic, found {type(critic).__name__}. Choose one "
                "with `critic=flatten_concat_shared` or `critic=template_state`."
            )
        several = len(composer.action_spaces_dict) > 1 or any(n != 1 for n in composer.agent_counts_dict.values())
        if several and not isinstance(critic, TorchStepStateCritic):
            raise ConfigError(
                f"model.critic: RLlib needs a value for each actor, but a {type(critic).__name__} values all sub-steps "
                "of an environment step together. Choose `critic=flatten_concat_step`."
            )
        self.critic = critic
        self.critic_key = next(iter(critic.networks)) if len(critic.networks) == 1 else self.step_key
        self.critic_net = critic.networks[self.critic_key]
        embeddings = embedding_spaces(self.policy, composer.observation_spaces_dict)
        self.shares_embeddings = bool(embeddings[self.step_key])

    @override(TorchRLModule)
    def _forward_train(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        logits, embeddings = self.policy_outputs(batch[Columns.OBS])
        outputs: dict[str, Any] = {Columns.ACTION_DIST_INPUTS: logits}
        if embeddings:
            outputs[Columns.EMBEDDINGS] = embeddings
        return outputs

    @override(apis.ValueFunctionAPI)
    def compute_values(self, batch: dict[str, Any], embeddings: Any = None) -> torch.Tensor:
        """Return values `[B]`; shared embeddings are computed if they are not given."""
        inputs = self.float_observations(batch[Columns.OBS])
        if self.shares_embeddings:
            inputs = {**inputs, **(embeddings if embeddings is not None else self.policy_outputs(inputs)[1])}
        device = str(next(iter(inputs.values())).device)
        if self.critic.device != device:
            self.critic.to(device)
        value: Any = self.critic.predict_value(inputs, self.critic_key)
        values: torch.Tensor = value["value"] if isinstance(value, dict) else value
        return values

    @override(apis.InferenceOnlyAPI)
    def get_non_inference_attributes(self) -> list[str]:
        return ["critic_net"]


class PolicyTarget(apis.TargetNetworkAPI):
    """Mixin of modules with a target policy network."""

    policy_net: nn.Module
    target_policy_net: nn.Module

    @override(apis.TargetNetworkAPI)
    def make_target_networks(self) -> None:
        self.target_policy_net = make_target_network(self.policy_net)

    @override(apis.TargetNetworkAPI)
    def get_target_network_pairs(self) -> list[tuple[nn.Module, nn.Module]]:
        return [(self.policy_net, self.target_policy_net)]


class TargetPolicyModule(PolicyGradientModule, PolicyTarget):
    """Policy network, target policy network and state critic, for APPO."""

    @override(apis.TargetNetworkAPI)
    def forward_target(self, batch: dict[str, Any]) -> dict[str, Any]:
        with torch.no_grad():
            logits = self.policy_outputs(batch[Columns.OBS], self.target_policy_net)[0]
        return {apis.TARGET_NETWORK_ACTION_DIST_INPUTS: logits}

    @override(apis.InferenceOnlyAPI)
    def get_non_inference_attributes(self) -> list[str]:
        return [*super().get_non_inference_attributes(), "target_policy_net"]


# -- action values -----------------------------------------------------------------------------------------------------


class QPolicyModule(MazeRLModule, apis.InferenceOnlyAPI, apis.QNetAPI, PolicyTarget):
    """For DQN: the logits of the policy network are the values of the actions. A critic is not used."""

    @override(MazeRLModule)
    def setup(self) -> None:
        super().setup()
        head, space = next(iter(self.step_action_space.spaces.items()))
        if not isinstance(space, spaces.Discrete):
            raise ConfigError(
                f"rllib/algorithm=dqn: action head `{head}` is {space}, and DQN takes a Discrete action. Discretise it "
                "with the DiscretizeActionsWrapper, or choose sac, ppo, appo or impala."
            )
        options = self.maze_config.options
        self.uses_double_q = bool(options.get("double_q", True))
        self.epsilon_schedule = Scheduler(fixed_value_or_schedule=options.get("epsilon", 0.05), framework="torch")

    @override(TorchRLModule)
    def _forward_inference(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        with torch.no_grad():
            return {Columns.ACTIONS: self._values(batch).argmax(-1)}

    @override(TorchRLModule)
    def _forward_exploration(self, batch: dict[str, Any], t: int = 0, **kwargs: Any) -> dict[str, Any]:
        """Sample epsilon-greedy among the actions that are not masked."""
        self.epsilon_schedule.update(t)
        epsilon = float(self.epsilon_schedule.get_current_value())
        with torch.no_grad():
            values = self._values(batch)
            head = next(iter(self.step_action_space.spaces))
            check_logits(values.cpu().numpy(), values.shape[-1:], head, "model.policy")
            allowed = values > torch.finfo(values.dtype).min
            random_actions = torch.multinomial(allowed.float(), num_samples=1).squeeze(-1)
            explores = torch.rand(values.shape[0], device=values.device) < epsilon
            return {Columns.ACTIONS: torch.where(explores, random_actions, values.argmax(-1))}

    @override(TorchRLModule)
    def _forward_train(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        outputs = {QF_PREDS: self._values(batch)}
        with torch.no_grad():
            following = {Columns.OBS: batch[Columns.NEXT_OBS]}
            if self.uses_double_q:
                outputs[QF_NEXT_PREDS] = self._values(following)
            outputs[QF_TARGET_NEXT_PREDS] = self.forward_target(following)[QF_PREDS]
        return outputs

    @override(apis.QNetAPI)
    def compute_q_values(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {QF_PREDS: self._values(batch)}

    @override(apis.TargetNetworkAPI)
    def forward_target(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {QF_PREDS: self.policy_outputs(batch[Columns.OBS], self.target_policy_net)[0]}

    @override(apis.InferenceOnlyAPI)
    def get_non_inference_attributes(self) -> list[str]:
        return ["target_policy_net"]

    def _values(self, batch: Mapping[str, Any]) -> torch.Tensor:
        return self.policy_outputs(batch[Columns.OBS])[0]


class SoftActorCriticModule(MazeRLModule, apis.InferenceOnlyAPI, apis.QNetAPI, apis.TargetNetworkAPI):
    """For SAC: a policy network and the pair of networks of a state-action critic, with their targets."""

    @override(MazeRLModule)
    def setup(self) -> None:
        super().setup()
        self.head, self.head_space = next(iter(self.step_action_space.spaces.items()))
        self.is_discrete = isinstance(self.head_space, spaces.Discrete)
        distribution = self.action_dist_cls.mapper.distribution_class(self.head)
        if not self.is_discrete and not hasattr(distribution, "rsample_with_log_prob"):
            raise ConfigError(
                f"model.distribution_mapper_config: SAC needs actions with gradients, and {distribution.__name__} of "
                f"head `{self.head}` gives none. Use "
                "maze.distributions.squashed_gaussian.SquashedGaussianProbabilityDistribution."
            )
        # RLlib's learner optimises encoders and heads; a Maze network is both
        self.pi_encoder, self.qf_encoder, self.qf_twin_encoder = nn.Identity(), nn.Identity(), nn.Identity()

    @override(MazeRLModule)
    def take_networks(self, policy_net: nn.Module, composer: BaseModelComposer) -> None:
        super().take_networks(policy_net, composer)
        critic = composer.critic
        if not isinstance(critic, TorchStateActionCritic):
            raise ConfigError(
                f"model.critic: SAC needs a state-action critic, found {type(critic).__name__}. Choose one with "
                "`critic=flatten_concat_state_action` or `critic=template_state_action`."
            )
        key = next(iter(critic.networks))
        self.qf, self.qf_twin = critic.networks[key]
        self.target_qf, self.target_qf_twin = critic.target_networks[key]

    @property
    def pi(self) -> nn.Module:
        """The policy network by RLlib's name."""
        return self.policy_net

    @override(TorchRLModule)
    def _forward_train(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        observations = self.float_observations(batch[Columns.OBS])
        following = self.float_observations(batch[Columns.NEXT_OBS])
        logits = self.policy_outputs(observations)[0]
        actions = None if self.is_discrete else batch[Columns.ACTIONS]
        outputs = {
            QF_PREDS: self._q(self.qf, observations, actions),
            sac_learner.QF_TWIN_PREDS: self._q(self.qf_twin, observations, actions),
        }
        sampled, log_prob = self._sample(logits)
        with torch.no_grad():
            next_logits = self.policy_outputs(following)[0]
            next_sampled, next_log_prob = self._sample(next_logits)
            target = self._smaller(self.target_qf, self.target_qf_twin, following, next_sampled)
        if self.is_discrete:
            outputs[sac_learner.ACTION_LOG_PROBS], outputs[sac_learner.ACTION_PROBS] = masked_log_probs(logits)
            of_next = masked_log_probs(next_logits)
            outputs[sac_learner.ACTION_LOG_PROBS_NEXT], outputs[sac_learner.ACTION_PROBS_NEXT] = of_next
            return {**outputs, sac_learner.QF_TARGET_NEXT: target}
        pair = nn.ModuleList([self.qf, self.qf_twin])
        pair.requires_grad_(False)  # the loss of the actor updates the actor only
        try:
            q_curr = self._smaller(self.qf, self.qf_twin, observations, sampled)
        finally:
            pair.requires_grad_(True)
        return {
            **outputs,
            Columns.ACTION_DIST_INPUTS: logits,
            sac_learner.ACTION_DIST_INPUTS_NEXT: next_logits,
            "logp_resampled": log_prob,
            "logp_next_resampled": next_log_prob,
            "q_target_next": target,
            "q_curr": q_curr,
        }

    @override(apis.QNetAPI)
    def compute_q_values(self, batch: dict[str, Any], squeeze: bool = True) -> torch.Tensor:
        return self._of_batch(self.qf, self.qf_twin, batch)

    @override(apis.TargetNetworkAPI)
    def make_target_networks(self) -> None:
        for network, target in self.get_target_network_pairs():
            target.load_state_dict(network.state_dict())
            target.requires_grad_(False)

    @override(apis.TargetNetworkAPI)
    def get_target_network_pairs(self) -> list[tuple[nn.Module, nn.Module]]:
        return [(self.qf, self.target_qf), (self.qf_twin, self.target_qf_twin)]

    @override(apis.TargetNetworkAPI)
    def forward_target(self, batch: dict[str, Any], squeeze: bool = True) -> torch.Tensor:
        return self._of_batch(self.target_qf, self.target_qf_twin, batch)

    @override(apis.InferenceOnlyAPI)
    def get_non_inference_attributes(self) -> list[str]:
        return ["qf", "qf_twin", "target_qf", "target_qf_twin"]

    def _of_batch(self, first: nn.Module, second: nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
        actions = None if self.is_discrete else batch[Columns.ACTIONS]
        return self._smaller(first, second, self.float_observations(batch[Columns.OBS]), actions)

    def _smaller(
        self, first: nn.Module, second: nn.Module, observations: dict[str, torch.Tensor], actions: torch.Tensor | None
    ) -> torch.Tensor:
        return torch.minimum(self._q(first, observations, actions), self._q(second, observations, actions))

    def _sample(self, logits: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Sample actions with gradients, and return their log-probabilities; nothing for discrete actions."""
        if self.is_discrete:
            return None, None
        distribution: Any = self.action_dist_cls.from_logits(logits).joint.distribution_dict[self.head]
        return distribution.rsample_with_log_prob()  # type: ignore[no-any-return]

    def _q(
        self, network: nn.Module, observations: dict[str, torch.Tensor], actions: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return values `[B]` of given actions, or `[B, n]` of all actions."""
        if actions is None:
            return network(observations)[q_values_key(self.head)]  # type: ignore[no-any-return]  # nn.Module.__call__
        encoded = encode_action(self.head_space, actions, torch.get_default_dtype())
        return network({**observations, self.head: encoded})["q_value"].squeeze(-1)  # type: ignore[no-any-return]


# -- weights -----------------------------------------------------------------------------------------------------------


def load_into_runner(states: Mapping[str, Mapping[str, Any]], env_runner: Any) -> None:
    """Load a part of the state of an env runner's modules; runs in its process.

    RLlib itself ignores weights of an update that the runner has already.

    :param states: The parts by module.
    :param env_runner: The env runner.
    """
    module = env_runner.module  # `None`: a runner without environments
    for name, part in states.items() if module is not None else ():
        own = module[name] if isinstance(module, MultiRLModule) else module
        own.load_state_dict(convert_to_torch_tensor(part), strict=False)


def require_finite(weights: Mapping[str, Mapping[str, Any]], when: str) -> None:
    """Refuse weights that are NaN or infinite, with which RLlib would continue.

    :param weights: States of all modules.
    :param when: Time of the check, for the message.
    :raises NonFiniteError: Names module and weights.
    """
    for module, state in weights.items():
        for name, value in state.items():
            array = np.asarray(value)
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise NonFiniteError(
                    f"{when}: the weights `{name}` of RLlib's module {module} are not finite. Check rewards and "
                    "observations of the environment, or reduce algorithm.config.lr. The best policy so far is kept."
                )
