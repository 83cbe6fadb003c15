"""Hyperparameters that the actor-critic trainers share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from maze.core.errors import ConfigError
from maze.train.trainers.common.config_classes import AlgorithmConfig


@dataclass
class ActorCriticConfig(AlgorithmConfig):
    """Hyperparameters shared by A2C and PPO."""

    critic = "state"
    sequence_length = 0
    """Most steps of a sequence that gradients of a recurrent model flow back through; 0: no limit. PPO's field."""

    epoch_length: int = 25
    """Number of updates per epoch. Each update collects one rollout; each epoch ends with an evaluation."""

    patience: int = 15
    """Number of epochs without a better evaluation after which training stops; 0 never stops early."""

    critic_burn_in_epochs: int = 0
    """Number of epochs at the start in which the critic learns alone and the policy stays as it is."""

    n_rollout_steps: int = 100
    """Number of steps taken in each environment for a rollout."""

    lr: float = 0.0005
    """Learning rate of the Adam optimizer at the start of the run."""

    gamma: float = 0.98
    """Discount per environment step."""

    gae_lambda: float = 1.0
    """Generalized advantage estimation: 1 has no bias but the variance of full returns, 0 trusts the critic alone."""

    policy_loss_coef: float = 1.0
    """Weight of the policy loss."""

    value_loss_coef: float = 0.5
    """Weight of the value loss, the mean squared error of the predicted returns."""

    entropy_coef: float = 0.00025
    """Weight of the entropy bonus that keeps the policy exploring."""

    max_grad_norm: float = 0.0
    """The gradient is scaled down to this norm where it is larger; 0 leaves it alone."""

    device: str = "cpu"
    """Where networks are trained: `cpu`, `cuda`, or `cuda:<index>`."""

    advantage_normalization: bool = field(default=True, kw_only=True)
    """Whether the advantages of each minibatch are shifted and scaled to mean 0 and standard deviation 1."""

    lr_schedule: str = field(default="constant", kw_only=True)
    """How the learning rate develops: `constant`, or `linear` or `cosine` to zero at the end of `n_epochs`."""

    optimizer_eps: float = field(default=1e-5, kw_only=True)
    """Adam's epsilon: larger values damp steps where gradients are tiny."""

    kl_to_initial_coef: float = field(default=0.0, kw_only=True)
    """Weight of KL(policy || initial policy): keeps a run that starts from a good policy close to it."""

    kl_to_initial_decay: float = field(default=1.0, kw_only=True)
    """Factor of that weight after each epoch in which the policy learns; 1 leaves it as it is."""

    reward_centering: float = field(default=0.0, kw_only=True)
    """How fast the estimate of the average reward follows each rollout, above 0 to 1; the estimate is subtracted from
    the rewards, and `gamma` may be 1. For problems without an end that are judged by averages; 0: off."""

    reward_scaling: bool = field(default=False, kw_only=True)
    """Whether rewards are divided by the running standard deviation of the discounted return, and clipped to
    [-10, 10], for learning only: statistics and evaluations keep the environment's. With `reward_centering`, what is
    left of them is divided by the standard deviation of the value targets, and not clipped."""

    constraints: Sequence[str] = field(default_factory=list, kw_only=True)
    """Limits on statistics of events or on KPIs that the policy learns to keep (PPO, A2C), such as `late_share <= 0.05`
    or `order_lost per order_assigned <= 0.05`. The best model is selected by them as well, unless
    `rollout_evaluator.constraints` is set. Values are means over training episodes."""

    constraint_gains: Sequence[float] = field(default_factory=lambda: [1.0, 0.1, 0.0], kw_only=True)
    """Proportional, integral and derivative gain of the multipliers of constraints. Violations count in units of the
    bound."""

    constraint_margin: float = field(default=0.0, kw_only=True)
    """The multipliers aim below (or above) each bound by this share of it."""

    multiplier_limit: float = field(default=20.0, kw_only=True)
    """Largest multiplier of a constraint."""

    risk: str | None = field(default=None, kw_only=True)
    """Objective of risk: `cvar:0.1`, the mean of the worst tenth of the episode returns, or a mixture such as
    `0.5*mean+0.5*cvar:0.1`; `null`: the mean. The latest model is kept as the best one, unless
    `rollout_evaluator.keep` or `.objective` is set."""

    n_quantiles: int = field(default=50, kw_only=True)
    """Number of quantiles of the critic, with `risk`. More of them represent rarer losses."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_integer("n_rollout_steps", minimum=1)
        self.require_number("lr", 0.0)  # 0 shows how good the initial policy is
        self.require_number("optimizer_eps", 0.0, above=True)
        for name in ("gamma", "gae_lambda", "reward_centering"):
            self.require_number(name, 0.0, 1.0)
        for name in ("policy_loss_coef", "value_loss_coef", "entropy_coef", "max_grad_norm"):
            self.require_number(name, 0.0)
        self.require_choice("lr_schedule", ("constant", "linear", "cosine"))
        if self.risk is not None and self.reward_centering:
            raise ConfigError(
                "algorithm.risk: expected `reward_centering=0`, because problems without an end have no episode "
                f"returns; found {self.reward_centering}."
            )
        self.require_number("constraint_margin", 0.0, 1.0)
        self.require_number("multiplier_limit", 0.0, above=True)
        if len(self.constraint_gains) != 3 or not all(gain >= 0 for gain in self.constraint_gains):
            raise ConfigError(
                "algorithm.constraint_gains: expected a proportional, an integral and a derivative gain of at least 0, "
                f"found {self.constraint_gains!r}."
            )
        if isinstance(self.constraints, str):
            raise ConfigError(f"algorithm.constraints: expected a list of texts, found {self.constraints!r}.")
        evaluator = self.rollout_evaluator
        if self.constraints and isinstance(evaluator, Mapping) and not evaluator.get("constraints"):
            self.rollout_evaluator = {**evaluator, "constraints": list(self.constraints)}
