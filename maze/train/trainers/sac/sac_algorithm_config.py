"""Hyperparameters of SAC."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from maze.core.annotations import override
from maze.core.utils.config_utils import Amount, Count, Natural, Positive, Share
from maze.train.trainers.common.config_classes import AlgorithmConfig, ReplayConfig
from maze.train.trainers.common.evaluators.evaluator import default_rollout_evaluator


@dataclass
class SACAlgorithmConfig(ReplayConfig):
    """Hyperparameters of SAC, and of SAC from demonstrations."""

    critic = "state-action"
    trainer = "maze.train.trainers.sac.sac_trainer.SAC"
    distributions = (
        {
            "action_space": "gymnasium.spaces.Box",
            "bounded": True,
            "distribution": "maze.distributions.squashed_gaussian.SquashedGaussianProbabilityDistribution",
        },
    )

    n_rollout_steps: Count = 1
    """Number of environment steps of a rollout."""

    lr: Positive = 0.001
    """Learning rate of policy and critics."""

    entropy_coef: Amount = 0.2
    """Weight of the entropy in the objective (alpha); where it is tuned, its first value."""

    gamma: Share = 0.99
    """Discount per environment step."""

    max_grad_norm: Amount = 0.0
    """The gradients of policy and critics are scaled down to this norm where they are larger; 0 leaves them alone."""

    num_actors: Count = 1
    """Number of environments that collect rollouts."""

    batch_size: Count = 100
    """Number of transitions (or rollouts, where they are not split) in a batch."""

    num_batches_per_iter: Count = 1
    """Number of batches to learn from in each update."""

    tau: Share = 0.005
    """Step size of the target networks towards the critics; 1 copies the weights."""

    target_update_interval: Count = 1
    """Number of batches between two steps of the target networks."""

    device: str = "cpu"
    """Device of the networks: `cpu`, `cuda`, or `cuda:<index>`."""

    entropy_tuning: bool = True
    """Whether the entropy coefficient is learned, so that the policy keeps its target entropy."""

    target_entropy_multiplier: Amount = 1.0
    """Factor of the target entropy; see :func:`~maze.train.trainers.sac.sac_trainer.target_entropy`."""

    entropy_coef_lr: Positive = 0.0007
    """Learning rate of the entropy coefficient."""

    split_rollouts_into_transitions: bool = True
    """Whether the replay buffer holds single transitions instead of whole rollouts."""

    replay_buffer_size: Count = 1000000
    """Maximum number of transitions (or rollouts); the oldest ones are replaced."""

    initial_buffer_size: Count = 10000
    """Number of transitions (or rollouts) collected by the initial sampling policy before learning."""

    initial_sampling_policy: Any = field(
        default_factory=lambda: {"_target_": "maze.core.agent.random_policy.RandomPolicy"}
    )
    """The policy that collects them, or its configuration, without the action spaces."""

    rollouts_per_iteration: Count = 1
    """Number of rollouts collected before each update, all environments together."""

    epoch_length: int = 100
    """Number of updates per epoch. Each epoch ends with an evaluation."""

    patience: int = 50
    """Number of epochs without a better evaluation after which training stops; 0 never stops early."""

    rollout_evaluator: Any = field(default_factory=default_rollout_evaluator)
    """Evaluates the policy between epochs (or its configuration); `None`: training episodes select the model."""

    collect_ahead: bool | None = field(default=None, kw_only=True)
    """Whether rollouts are collected while the networks learn from those before, with the policy of one update ago;
    `None`: if environments are in worker processes (`runner=local`). `False`: they wait for each other, and all runners
    learn the same."""

    critic_burn_in_epochs: Natural = field(default=0, kw_only=True)
    """Number of epochs at the start in which only the critics learn."""

    optimizer_eps: Positive = field(default=1e-8, kw_only=True)
    """Adam's epsilon: larger values damp steps where gradients are tiny."""

    kl_to_initial_coef: Amount = field(default=0.0, kw_only=True)
    """Weight of KL(policy || initial policy), in units of returns: keeps a run that starts from a good policy
    close to it."""

    kl_to_initial_decay: Share = field(default=1.0, kw_only=True)
    """Factor of that weight after each epoch in which the policy learns; 1: constant."""

    @override(AlgorithmConfig)
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.entropy_tuning:  # of its logarithm
            self.require_number("entropy_coef", 0.0, above=True)
