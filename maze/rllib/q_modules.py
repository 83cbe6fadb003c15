"""Networks of a Maze model as RLlib's modules: algorithms with action values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from gymnasium import spaces
from ray.rllib.algorithms.dqn.default_dqn_rl_module import QF_NEXT_PREDS, QF_PREDS, QF_TARGET_NEXT_PREDS
from ray.rllib.algorithms.sac.sac_learner import (
    ACTION_DIST_INPUTS_NEXT,
    ACTION_LOG_PROBS,
    ACTION_LOG_PROBS_NEXT,
    ACTION_PROBS,
    ACTION_PROBS_NEXT,
    QF_TARGET_NEXT,
    QF_TWIN_PREDS,
)
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.apis import InferenceOnlyAPI, QNetAPI, TargetNetworkAPI
from ray.rllib.core.rl_module.torch import TorchRLModule
from ray.rllib.utils.schedules.scheduler import Scheduler
from torch import nn

from maze.core.agent.torch_state_action_critic import TorchStateActionCritic, encode_action, q_values_key
from maze.core.annotations import override
from maze.core.errors import ConfigError
from maze.distributions.utils import require_valid_rows
from maze.perception.models.model_composer import BaseModelComposer
from maze.rllib.rl_module import MazeRLModule, PolicyTarget


class QPolicyModule(MazeRLModule, InferenceOnlyAPI, QNetAPI, PolicyTarget):
    """For DQN: the logits of the policy network are the values of the actions. A critic is not used."""

    algorithm = "DQN"

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
            require_valid_rows(values, next(iter(self.step_action_space.spaces)))
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

    @override(QNetAPI)
    def compute_q_values(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {QF_PREDS: self._values(batch)}

    @override(TargetNetworkAPI)
    def forward_target(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {QF_PREDS: self.policy_outputs(batch[Columns.OBS], self.target_policy_net)[0]}

    @override(InferenceOnlyAPI)
    def get_non_inference_attributes(self) -> list[str]:
        return ["target_policy_net"]

    def _values(self, batch: Mapping[str, Any]) -> torch.Tensor:
        return self.policy_outputs(batch[Columns.OBS])[0]


class SoftActorCriticModule(MazeRLModule, InferenceOnlyAPI, QNetAPI, TargetNetworkAPI):
    """For SAC: a policy network and the pair of networks of a state-action critic, with their targets."""

    algorithm = "SAC"

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
            found = "none" if critic is None else f"a {type(critic).__name__}"
            raise ConfigError(
                f"model.critic: SAC needs a state-action critic, found {found}. Choose one with "
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
    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {Columns.ACTION_DIST_INPUTS: self.policy_outputs(batch[Columns.OBS])[0]}

    @override(TorchRLModule)
    def _forward_train(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        observations = self.float_observations(batch[Columns.OBS])
        following = self.float_observations(batch[Columns.NEXT_OBS])
        logits = self.policy_outputs(observations)[0]
        with torch.no_grad():
            next_logits = self.policy_outputs(following)[0]
        if self.is_discrete:
            return self._of_all_actions(observations, following, logits, next_logits)
        return self._of_sampled_actions(observations, following, logits, next_logits, batch[Columns.ACTIONS])

    def _of_all_actions(
        self,
        observations: dict[str, torch.Tensor],
        following: dict[str, torch.Tensor],
        logits: torch.Tensor,
        next_logits: torch.Tensor,
    ) -> dict[str, Any]:
        with torch.no_grad():
            target = torch.minimum(*(self._q(net, following) for net in (self.target_qf, self.target_qf_twin)))
        probs, log_probs = _categorical(logits)
        next_probs, next_log_probs = _categorical(next_logits)
        return {
            ACTION_PROBS: probs,
            ACTION_LOG_PROBS: log_probs,
            ACTION_PROBS_NEXT: next_probs,
            ACTION_LOG_PROBS_NEXT: next_log_probs,
            QF_PREDS: self._q(self.qf, observations),
            QF_TWIN_PREDS: self._q(self.qf_twin, observations),
            QF_TARGET_NEXT: target,
        }

    def _of_sampled_actions(
        self,
        observations: dict[str, torch.Tensor],
        following: dict[str, torch.Tensor],
        logits: torch.Tensor,
        next_logits: torch.Tensor,
        actions: torch.Tensor,
    ) -> dict[str, Any]:
        sampled, log_prob = self._sample(logits)
        with torch.no_grad():
            next_sampled, next_log_prob = self._sample(next_logits)
            target = torch.minimum(
                *(self._q(net, following, next_sampled) for net in (self.target_qf, self.target_qf_twin))
            )
        outputs = {
            Columns.ACTION_DIST_INPUTS: logits,
            ACTION_DIST_INPUTS_NEXT: next_logits,
            QF_PREDS: self._q(self.qf, observations, actions),
            QF_TWIN_PREDS: self._q(self.qf_twin, observations, actions),
            "logp_resampled": log_prob,
            "logp_next_resampled": next_log_prob,
            "q_target_next": target,
        }
        pair = nn.ModuleList([self.qf, self.qf_twin])
        pair.requires_grad_(False)  # the loss of the actor updates the actor only
        try:
            outputs["q_curr"] = torch.minimum(*(self._q(net, observations, sampled) for net in pair))
        finally:
            pair.requires_grad_(True)
        return outputs

    @override(QNetAPI)
    def compute_q_values(self, batch: dict[str, Any], squeeze: bool = True) -> torch.Tensor:
        return self._smaller(self.qf, self.qf_twin, batch)

    @override(TargetNetworkAPI)
    def make_target_networks(self) -> None:
        for network, target in self.get_target_network_pairs():
            target.load_state_dict(network.state_dict())
            target.requires_grad_(False)

    @override(TargetNetworkAPI)
    def get_target_network_pairs(self) -> list[tuple[nn.Module, nn.Module]]:
        return [(self.qf, self.target_qf), (self.qf_twin, self.target_qf_twin)]

    @override(TargetNetworkAPI)
    def forward_target(self, batch: dict[str, Any], squeeze: bool = True) -> torch.Tensor:
        return self._smaller(self.target_qf, self.target_qf_twin, batch)

    @override(InferenceOnlyAPI)
    def get_non_inference_attributes(self) -> list[str]:
        return ["qf", "qf_twin", "target_qf", "target_qf_twin"]

    def _smaller(self, first: nn.Module, second: nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
        observations = self.float_observations(batch[Columns.OBS])
        actions = None if self.is_discrete else batch[Columns.ACTIONS]
        return torch.minimum(self._q(first, observations, actions), self._q(second, observations, actions))

    def _sample(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample actions with gradients, and return their log-probabilities."""
        distribution: Any = self.action_dist_cls.from_logits(logits).joint.distribution_dict[self.head]
        actions, log_prob = distribution.rsample_with_log_prob()
        return actions, log_prob

    def _q(
        self, network: nn.Module, observations: dict[str, torch.Tensor], actions: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return values `[B]` of given actions, or `[B, n]` of all actions."""
        if actions is None:
            values: torch.Tensor = network(observations)[q_values_key(self.head)]
            return values
        encoded = encode_action(self.head_space, actions, torch.get_default_dtype())
        value: torch.Tensor = network({**observations, self.head: encoded})["q_value"]
        return value.squeeze(-1)


def _categorical(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return probabilities and their logarithms; both are zero for masked actions."""
    masked = logits <= torch.finfo(logits.dtype).min
    log_probs = torch.log_softmax(logits, dim=-1).masked_fill(masked, 0.0)
    return torch.softmax(logits, dim=-1).masked_fill(masked, 0.0), log_probs
