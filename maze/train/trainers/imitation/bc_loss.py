"""The loss of behavioural cloning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from gymnasium import spaces
from torch import Tensor
from torch.nn import functional

from maze.core.errors import ConfigError

if TYPE_CHECKING:
    from maze.core.agent.torch_policy import TorchPolicy
    from maze.core.agent.torch_policy_output import PolicySubStepOutput
    from maze.core.env.structured_env import ActorID, StepKeyType
    from maze.train.trainers.imitation.imitation_events import ImitationEvents

LossFunction = Callable[..., Tensor]
"""Function of prediction and target; for weighted losses also with `reduction="none"`."""
Statistics = dict[str, Tensor]
"""Values by name of the event."""

# Only the logits of masked actions, about -1e38, make a loss so large.
_IMPOSSIBLE = 1e30

_TOP_K = {1: "discrete_accuracy", 5: "discrete_top_5_accuracy", 10: "discrete_top_10_accuracy"}


@dataclass
class BCLoss:
    """Loss between the policy and the demonstrated actions: the sum over all sub-steps and action heads.

    :param action_spaces_dict: Action spaces by sub-step key.
    :param entropy_coef: Weight of the entropy bonus.
    :param loss_discrete: Compares logits with a discrete action; of multi-discrete actions, each choice.
    :param loss_box: Compares the policy's most probable (or mean) continuous action with the demonstrated one.
    :param loss_multi_binary: Compares logits with binary choices.
    """

    action_spaces_dict: dict[StepKeyType, spaces.Dict]
    entropy_coef: float
    loss_discrete: LossFunction = functional.cross_entropy
    loss_box: LossFunction = functional.mse_loss
    loss_multi_binary: LossFunction = functional.binary_cross_entropy_with_logits

    def calculate_loss(
        self,
        policy: TorchPolicy,
        observations: Sequence[dict[str, Any]],
        actions: Sequence[dict[str, Any]],
        actor_ids: Sequence[ActorID],
        events: ImitationEvents,
        weights: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """Return the loss of a minibatch.

        :param policy: The policy.
        :param observations: For each sub-step, tensors `[batch, ...]`.
        :param actions: For each sub-step, the demonstrated actions.
        :param actor_ids: The actor of each sub-step.
        :param events: Fired with loss, entropy and accuracies.
        :param weights: For each sub-step, weights of its actions `[batch]`. The loss is then the mean over the actions
            of all sub-steps, which may differ in their number; `None`: all count the same.
        :raises ConfigError: The data have other actions than the policy.
        """
        losses: list[Tensor] = []
        fired: list[tuple[str, tuple[Any, ...], Tensor]] = []
        for index, (observation, action, actor) in enumerate(zip(observations, actions, actor_ids, strict=True)):
            weight = None if weights is None else weights[index]
            output = policy.compute_substep_policy_output(observation, actor)
            terms: list[Tensor] = []
            for head, space in self.action_spaces_dict[actor[0]].items():
                target = torch.as_tensor(action[head]).to(policy.device)
                loss, statistics = self._head_loss(output, head, space, target, weight)
                terms.append(loss)
                fired += [(event, (*actor, head), value) for event, value in statistics.items()]
            substep_loss = torch.stack(terms).sum()
            entropy = output.entropy.mean()
            fired.append(("policy_loss", tuple(actor), substep_loss))
            fired.append(("policy_entropy", tuple(actor), entropy))
            objective = substep_loss - self.entropy_coef * entropy if self.entropy_coef else substep_loss
            losses.append(objective if weight is None else objective * (len(weight) / sum(map(len, weights or ()))))
        # one transfer from the device for all of them
        values = torch.stack([value.detach().float() for _, _, value in fired]).tolist()
        for (event, group, _), value in zip(fired, values, strict=True):
            if event == "policy_loss" and value > _IMPOSSIBLE:
                raise ConfigError(
                    f"runner.dataset: sub-step {group[0]!r}: the data have actions that the policy cannot take, as the "
                    "action mask of their observation excludes them. Was it recorded in another environment, or with "
                    "other wrappers?"
                )
            getattr(events, event)(*group, value)
        return torch.stack(losses).sum()

    def _head_loss(
        self,
        output: PolicySubStepOutput,
        head: str,
        space: spaces.Space[Any],
        target: Tensor,
        weight: Tensor | None = None,
    ) -> tuple[Tensor, Statistics]:
        logits = output.action_logits[head]
        if isinstance(space, spaces.Discrete):
            choice = target.long()
            return _weighted(self.loss_discrete, logits, choice, weight), _accuracies(logits, choice)
        if isinstance(space, spaces.MultiDiscrete):
            choices = target.reshape(len(target), -1).long().unbind(-1)
            parts = list(zip(torch.split(logits, space.nvec.flatten().tolist(), dim=-1), choices, strict=True))
            loss = torch.stack([_weighted(self.loss_discrete, part, choice, weight) for part, choice in parts]).sum()
            accuracies = [_accuracies(part, choice) for part, choice in parts]
            names = dict.fromkeys(name for one in accuracies for name in one)
            return loss, {name: torch.stack([one[name] for one in accuracies if name in one]).mean() for name in names}
        if isinstance(space, spaces.MultiBinary):
            binary = target.to(logits.dtype).reshape(logits.shape)
            accuracy = ((logits > 0) == (binary > 0.5)).float().mean()
            loss = _weighted(self.loss_multi_binary, logits, binary, weight)
            return loss, {"multi_binary_accuracy": accuracy}
        if isinstance(space, spaces.Box):
            predicted = output.prob_dist.distribution_dict[head].deterministic_sample()
            wanted = target.to(predicted.dtype).reshape(predicted.shape)
            deviation = (predicted.detach() - wanted).abs().mean()
            return _weighted(self.loss_box, predicted, wanted, weight), {"box_mean_abs_deviation": deviation}
        raise ConfigError(
            f"Action `{head}`: behavioural cloning knows Discrete, MultiDiscrete, MultiBinary and Box spaces, found "
            f"{type(space).__name__}."
        )


def _weighted(loss: LossFunction, predicted: Tensor, target: Tensor, weight: Tensor | None) -> Tensor:
    """Return the mean loss of a batch; with weights, the mean of the weighted losses of its rows."""
    if weight is None:
        return loss(predicted, target)
    return (loss(predicted, target, reduction="none").reshape(len(weight), -1).mean(-1) * weight).mean()


def _accuracies(logits: Tensor, choice: Tensor) -> Statistics:
    """Return the share of choices among the k most probable ones, for each k that leaves something out."""
    n_choices = logits.shape[-1]
    largest = max(k for k in _TOP_K if k == 1 or k < n_choices)
    hits = logits.detach().topk(largest, dim=-1).indices == choice.unsqueeze(-1)
    return {name: hits[..., :k].any(-1).float().mean() for k, name in _TOP_K.items() if k <= largest}
