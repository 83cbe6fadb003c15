"""Warm start: behavioural cloning of another policy before learning."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from maze.core.agent.policy import Policy, build_policy
from maze.core.agent.torch_policy import TorchPolicy
from maze.core.env.space_values import rows_outside
from maze.core.errors import ConfigError
from maze.core.rollout.rollout_generator import RolloutGenerator
from maze.core.utils.config_utils import Amount, CheckedConfig, Count, Positive
from maze.core.utils.seeding import seeded_generator
from maze.train.trainers.common.actor_critic.valuation import decisions_by_policy
from maze.train.trainers.common.observation_statistics import ObservationStatistics

logger = logging.getLogger(__name__)


@dataclass
class WarmStart(CheckedConfig):
    """Warm start of a new run: behavioural cloning of another policy."""

    section = "warm_start"

    policy: Any = None
    """Configuration of the policy that is cloned, an option of the group `policy`; `null`: none is."""

    n_steps: Count = 20_000
    """Number of recorded environment steps, over all environments."""

    n_epochs: Count = 10
    """Number of passes over them."""

    batch_size: Count = 500
    """Number of environment steps in a minibatch."""

    lr: Positive = 0.001
    """Learning rate of the Adam optimizer, which is used for the cloning alone."""

    entropy_coef: Amount = 0.0
    """Weight of the entropy bonus. With it, actions that were never recorded keep a probability: in the end about
    `exp(-1 / entropy_coef)` of that of actions that were always recorded."""


def start_warm(
    trainer: Any,
    section: Mapping[str, Any],
    make_rollouts: Callable[[], RolloutGenerator],
    next_seed: Callable[[], int],
) -> None:
    """Clone the policy that `warm_start` names, if there is one, in environments like those of the run.

    :param trainer: The trainer, as it was built.
    :param section: The section `warm_start` of the configuration.
    :param make_rollouts: Makes a rollout generator with environments like those of the run.
    :param next_seed: Returns the next seed of the run for a policy.
    :raises ConfigError: The algorithm has no policy whose actions have probabilities, or the policy carries hidden
        states from step to step.
    """
    config = WarmStart.from_config(section)
    if not config.policy:
        return
    learner: Any = getattr(trainer, "policy", None)
    if not hasattr(learner, "compute_policy_output") or learner.is_recurrent or _has_values(learner):
        raise ConfigError(
            "warm_start.policy: cloning needs a policy with probabilities of actions and without hidden states, found "
            f"that of {type(trainer).__name__}. Use A2C, PPO, IMPALA, SAC or ES, and `model.recurrence=true` with "
            "stacked observations instead of hidden states, or leave it empty."
        )
    rollouts = make_rollouts()
    try:
        demonstrator = build_policy(config.policy, rollouts.env, "warm_start.policy")
        demonstrator.seed(next_seed())
        share = clone_policy(learner, demonstrator, rollouts, config, next_seed(), trainer.observation_statistics)
    finally:
        rollouts.env.close()
    name = type(demonstrator).__name__
    logger.info("Warm start: the policy gives the actions of %s a probability of %.3f.", name, share)


def _has_values(learner: TorchPolicy) -> bool:
    """Return whether logits are values of actions, as those of DQN and CQL are."""
    mapper = learner.distribution_mapper
    return any((mapper.describe_head(head) or {}).get("is_greedy") for head in mapper.action_heads)


def clone_policy(
    learner: TorchPolicy,
    demonstrator: Policy,
    rollouts: RolloutGenerator,
    config: WarmStart,
    seed: int,
    statistics: ObservationStatistics | None = None,
) -> float:
    """Train a policy to act as another one does, by maximum likelihood.

    :param learner: The policy that learns.
    :param demonstrator: The policy that acts.
    :param rollouts: Rollouts in which it acts.
    :param config: Settings of the warm start.
    :param seed: Seed of the order of minibatches.
    :param statistics: Statistics of observations that the model's networks normalize; they are updated first.
    :return: Geometric mean of the probabilities that the learner gives to the demonstrated actions in the end.
    """
    columns = rollouts.allocate(-(-config.n_steps // int(rollouts.env.n_envs)))
    rollouts.collect(demonstrator, columns)
    (statistics or ObservationStatistics(learner)).learn(columns)
    by_policy = decisions_by_policy(columns, learner.substeps_with_separate_agent_nets, learner.device)
    parts = [substeps for substeps, _ in by_policy]
    for one in itertools.chain(*parts):
        for head, values in one.action.items():
            space = rollouts.env.action_spaces_dict[one.actor_id.step_key][head]
            if rows_outside(values.numpy(force=True), space).any():
                found = f"action `{head}` of sub-step {one.actor_id.step_key!r} is not always an element of {space}"
                raise ConfigError(f"warm_start.policy: {type(demonstrator).__name__} does not fit: {found}.")
    optimizer = torch.optim.Adam(learner.parameters(), lr=config.lr)
    generator = seeded_generator(seed)
    learner.train()
    log_probs: list[float] = []
    for _ in range(config.n_epochs):
        log_probs.clear()
        for substeps in parts:
            order = torch.randperm(len(next(iter(substeps[0].action.values()))), generator=generator)
            for rows in torch.split(order, config.batch_size):
                batch = [substep.rows(rows.to(learner.device)) for substep in substeps]
                outputs = [learner.compute_substep_policy_output(one.observation, one.actor_id) for one in batch]
                pairs = zip(outputs, batch, strict=True)
                log_prob = torch.stack([output.prob_dist.joint_log_prob(one.action) for output, one in pairs]).mean()
                optimizer.zero_grad()
                loss = -log_prob
                if config.entropy_coef:
                    loss = loss - config.entropy_coef * torch.stack([output.entropy for output in outputs]).mean()
                loss.backward()  # type: ignore[no-untyped-call]  # torch's
                optimizer.step()
                log_probs.append(float(log_prob.detach()))
    optimizer.zero_grad()
    return float(torch.tensor(log_probs).mean().exp())
