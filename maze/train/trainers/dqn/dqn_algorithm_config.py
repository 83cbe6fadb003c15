"""Hyperparameters of DQN."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from maze.core.utils.config_utils import Amount, Count, Positive, Share
from maze.train.trainers.common.config_classes import ReplayConfig
from maze.train.trainers.common.evaluators.evaluator import default_rollout_evaluator


@dataclass(kw_only=True)
class DQNAlgorithmConfig(ReplayConfig):
    """Hyperparameters of :class:`~maze.train.trainers.dqn.dqn_trainer.DQN`."""

    critic = "sub-step state"
    trainer = "maze.train.trainers.dqn.dqn_trainer.DQN"
    distributions = (
        {
            "action_space": "gymnasium.spaces.Discrete",
            "distribution": "maze.distributions.categorical.GreedyCategoricalProbabilityDistribution",
        },
        {
            "action_space": "gymnasium.spaces.MultiDiscrete",
            "distribution": "maze.distributions.multi_categorical.GreedyMultiCategoricalProbabilityDistribution",
        },
    )

    lr: Positive = 0.001
    """Learning rate of Adam."""

    gamma: Share = 0.99
    """Discount per environment step."""

    double: bool = True
    """Whether the learned networks choose the action that the target networks evaluate (van Hasselt et al. 2016)."""

    dueling: bool = True
    """Whether the critic predicts the value of states and the policy's logits are advantages (Wang et al. 2016).
    Otherwise the logits are the values of actions, and the critic is unused."""

    n_step_returns: Count = 1
    """Number of environment steps whose rewards precede the bootstrapped value (Hessel et al. 2018)."""

    prioritized: bool = False
    """Whether steps with large errors are sampled more often (Schaul et al. 2016)."""

    priority_alpha: Share = 0.6
    """Exponent of the errors in the sampling probability; 0 samples uniformly."""

    priority_beta: Share = 0.4
    """Initial exponent of the importance weights; it rises to 1 while the exploration falls."""

    initial_epsilon: Share = 1.0
    """Initial share of random actions."""

    final_epsilon: Share = 0.05
    """Share of random actions after `epsilon_decay_steps`."""

    epsilon_decay_steps: Count = 10000
    """Number of environment steps, all environments together, in which the share falls linearly."""

    tau: Share = 1.0
    """Step size of the target networks towards the learned ones; 1 copies the weights (Mnih et al. 2015)."""

    target_update_interval: Count = 250
    """Number of batches between two steps of the target networks."""

    max_grad_norm: Amount = 10.0
    """Gradients are scaled down to this norm where they are larger; 0 leaves them alone."""

    optimizer_eps: Positive = 1e-8
    """Adam's epsilon."""

    device: str = "cpu"
    """Device of the networks: `cpu`, `cuda`, or `cuda:<index>`."""

    batch_size: Count = 64
    """Number of transitions in a batch."""

    num_batches_per_iter: Count = 1
    """Number of batches to learn from in each update."""

    num_actors: Count = 1
    """Number of environments that collect transitions."""

    n_rollout_steps: Count = 1
    """Number of environment steps of a rollout."""

    rollouts_per_iteration: Count = 1
    """Number of rollouts collected before each update, all environments together."""

    collect_ahead: bool | None = None
    """Whether rollouts are collected while the networks learn from those before, with the policy of one update ago;
    `None`: if environments are in worker processes (`runner=local`). `False`: they wait for each other, and all runners
    learn the same."""

    replay_buffer_size: Count = 100000
    """Maximum number of transitions; the oldest ones are replaced."""

    initial_buffer_size: Count = 1000
    """Number of transitions collected by the initial sampling policy before learning."""

    initial_sampling_policy: Any = None
    """The policy that collects them, or its configuration; `None`: any action that is allowed."""

    epoch_length: int = 1000
    """Number of updates per epoch. Each epoch ends with an evaluation."""

    patience: int = 0
    """Number of epochs without a better evaluation after which training stops; 0 never stops early."""

    rollout_evaluator: Any = field(default_factory=default_rollout_evaluator)
    """Evaluates the policy between epochs (or its configuration); `None`: training episodes select the model."""

    risk: str | None = None
    """Objective of risk: actions are chosen by `cvar:0.1`, the mean of the worst tenth of the quantiles of the return,
    or a mixture such as `0.5*mean+0.5*cvar:0.1`. `cvar:1` is QR-DQN (Dabney et al. 2018), `null` is DQN. The latest
    model is kept as the best one, unless `rollout_evaluator.keep` or `.objective` is set."""

    n_quantiles: Count = 50
    """Number of quantiles of the return, with `risk`."""

    split_rollouts_into_transitions = True
