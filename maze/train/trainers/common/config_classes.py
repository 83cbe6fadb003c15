"""Configurations of training runs: dataclasses that carry values and check them."""

from __future__ import annotations

import re
from abc import ABC
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, cast

from maze.core.errors import ConfigError
from maze.core.utils.config_utils import Amount, CheckedConfig, Count, Natural, Positive, Share
from maze.core.utils.factory import TARGET_KEY, Factory

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from maze.perception.models.model_composer import CriticKind
    from maze.runner import Runner


@dataclass(frozen=True)
class Risk:
    """The objective `mean_weight * mean + (1 - mean_weight) * CVaR` of returns.

    CVaR (conditional value at risk, expected shortfall) is the mean of the worst share `level` of the returns
    (Rockafellar and Uryasev 2000).

    :param level: Share of the returns in (0, 1].
    :param mean_weight: Weight of the mean in [0, 1]; 0: the CVaR alone.
    """

    level: float
    mean_weight: float = 0.0

    @classmethod
    def parse(cls, text: Any) -> Risk:
        """Read `cvar:<level>` or `<weight>*mean+<weight>*cvar:<level>`.

        >>> Risk.parse("0.25*mean + 0.75*cvar:0.1")
        Risk(level=0.1, mean_weight=0.25)

        :param text: The text; spaces are ignored, and the mean goes first.
        :raises ConfigError: The text has another form, or the weights do not add up to 1.
        """
        number = r"(\d*\.?\d+)"
        match = re.fullmatch(rf"(?:{number}\*mean\+{number}\*)?cvar:{number}", re.sub(r"\s", "", str(text)))
        weight, of_tail, level = (float(part or 0.0) for part in match.groups()) if match else (0.0, 0.0, 0.0)
        is_mixture = match is not None and match[1] is not None
        if not 0.0 < level <= 1.0 or (is_mixture and abs(weight + of_tail - 1.0) > 1e-6):
            raise ConfigError(
                f"algorithm.risk: expected `cvar:<level>` or `<weight>*mean+<weight>*cvar:<level>`, with weights that "
                f"add up to 1 and a level above 0 and up to 1, such as `cvar:0.1` or `0.5*mean+0.5*cvar:0.1`; found "
                f"{text!r}."
            )
        return cls(level, weight)

    def weights(self, n_quantiles: int) -> list[float]:
        """Return the weight of each of `n_quantiles` quantiles in ascending order; they add up to 1.

        >>> Risk(level=0.5).weights(4)
        [0.5, 0.5, 0.0, 0.0]

        :param n_quantiles: Number of equally probable quantiles, at least 1.
        """
        covered = (min(max(self.level * n_quantiles - index, 0.0), 1.0) for index in range(n_quantiles))
        of_tail = (1.0 - self.mean_weight) / (self.level * n_quantiles)
        return [self.mean_weight / n_quantiles + of_tail * share for share in covered]


@dataclass
class AlgorithmConfig(CheckedConfig, ABC):
    """Hyperparameters and properties of an algorithm.

    An algorithm is this class and a trainer; both may be in any package, and nothing has to be registered:
    `algorithm._target_` names the configuration's class, which names the trainer. The author writes

    * the hyperparameters as fields with defaults and docstrings; types such as :data:`Count` and :data:`Share` are
      checked (in modules with `from __future__ import annotations`), all else in `__post_init__`;
    * `trainer` and, unless there is none, `critic`, and `distributions` where a policy's logits have another meaning;
    * a trainer, which defines how it is built (:meth:`~maze.train.trainers.common.trainer.Trainer.build`).

    Runners and placements, the command line, `RunContext`, model selection, checkpoints and sweeps need no further
    code. The attributes below the fields take effect where a configuration defines fields of the same names.
    """

    section = "algorithm"

    name: ClassVar[str] = ""
    """Name of the algorithm in messages and directories. Default: the name of the class without
    `AlgorithmConfig` or `Config`, in small letters."""

    critic: ClassVar[CriticKind | None] = None
    """The kind of critic that is learned besides the policy; `None`: none."""

    trainer: ClassVar[str | type[Any]] = ""
    """The class of the trainer, derived from :class:`~maze.train.trainers.common.trainer.Trainer`. Its path as text
    keeps the configuration cheap to import."""

    distributions: ClassVar[Sequence[Mapping[str, Any]]] = ()
    """Distributions that policies of this algorithm have unless the model configures others: entries of a
    `distribution_mapper_config`, which go before those of the model."""

    n_epochs: int = 0
    """Number of epochs to train; 0 trains until early stopping ends the run, and 1,000 epochs at most."""

    # Options of the life cycle of a run. An algorithm makes fields of those that it offers.
    epoch_length = 1
    patience = 0
    device = "cpu"
    critic_burn_in_epochs = 0
    kl_to_initial_coef = 0.0
    kl_to_initial_decay = 1.0
    rollout_evaluator = cast(Any, None)
    risk = cast("str | None", None)
    n_quantiles = 50

    def __init_subclass__(cls) -> None:
        if "name" not in cls.__dict__:
            cls.name = cls.__name__.removesuffix("Config").removesuffix("Algorithm").lower()

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_integer("n_epochs", "patience", minimum=0)
        self.require_integer("epoch_length", minimum=1)
        if self.risk is not None:
            Risk.parse(self.risk)
            evaluator = self.rollout_evaluator  # means would select models that do not avoid risk
            if isinstance(evaluator, Mapping) and not {"keep", "objective"} & {*evaluator}:
                self.rollout_evaluator = {**evaluator, "keep": "latest"}
        if not isinstance(self.device, str):
            raise ConfigError(f"algorithm.device: expected a name such as `cpu` or `cuda`, found {self.device!r}.")


@dataclass
class ActorCriticConfig(AlgorithmConfig):
    """Hyperparameters shared by A2C and PPO."""

    critic = "state"
    sequence_length = 0
    """Maximum number of steps of truncated back-propagation through time; 0: no limit. PPO's field."""
    value_clip_range = cast("float | None", None)
    """Change of a predicted value in an update from which its loss is clipped. PPO's field."""

    epoch_length: int = 25
    """Number of updates per epoch. Each update collects one rollout; each epoch ends with an evaluation."""

    patience: int = 15
    """Number of epochs without a better evaluation after which training stops; 0 never stops early."""

    critic_burn_in_epochs: Natural = 0
    """Number of epochs at the start in which only the critic learns."""

    n_rollout_steps: Count = 100
    """Number of steps taken in each environment for a rollout."""

    lr: Amount = 0.0005
    """Learning rate of the Adam optimizer at the start of the run. 0 evaluates the initial policy."""

    gamma: Share = 0.98
    """Discount per environment step."""

    gae_lambda: Share = 1.0
    """Generalized advantage estimation: 1 has no bias but the variance of full returns, 0 trusts the critic alone."""

    policy_loss_coef: Amount = 1.0
    """Weight of the policy loss."""

    value_loss_coef: Amount = 0.5
    """Weight of the value loss, the mean squared error of the predicted returns."""

    entropy_coef: Amount = 0.00025
    """Weight of the entropy bonus that keeps the policy exploring."""

    max_grad_norm: Amount = 0.0
    """The gradient is scaled down to this norm where it is larger; 0 leaves it alone."""

    device: str = "cpu"
    """Device of the networks: `cpu`, `cuda`, or `cuda:<index>`."""

    advantage_normalization: bool = field(default=True, kw_only=True)
    """Whether the advantages of each minibatch are shifted and scaled to mean 0 and standard deviation 1."""

    lr_schedule: str = field(default="constant", kw_only=True)
    """Schedule of the learning rate: `constant`, or `linear` or `cosine` to zero at the end of `n_epochs`."""

    optimizer_eps: Positive = field(default=1e-5, kw_only=True)
    """Adam's epsilon: larger values damp steps where gradients are tiny."""

    kl_to_initial_coef: Amount = field(default=0.0, kw_only=True)
    """Weight of KL(policy || initial policy): keeps a run that starts from a good policy close to it."""

    kl_to_initial_decay: Share = field(default=1.0, kw_only=True)
    """Factor of that weight after each epoch in which the policy learns; 1: constant."""

    reward_centering: Share = field(default=0.0, kw_only=True)
    """Rate at which the estimate of the average reward follows each rollout, above 0 to 1. The estimate is subtracted
    from the rewards, and `gamma` may be 1. For problems without an end that are judged by averages; 0: off."""

    reward_scaling: bool = field(default=False, kw_only=True)
    """Whether rewards are divided by the running standard deviation of the discounted return, and clipped to
    [-10, 10], for learning only: statistics and evaluations keep the environment's. With `reward_centering`, the
    centred rewards are divided by the standard deviation of the value targets, and not clipped."""

    constraints: Sequence[str] = field(default_factory=list, kw_only=True)
    """Limits on statistics of events or on KPIs that the policy learns to keep (PPO, A2C), such as `late_share <= 0.05`
    or `order_lost per order_assigned <= 0.05`. The best model is selected by them as well, unless
    `rollout_evaluator.constraints` is set. Values are means over training episodes."""

    constraint_gains: Sequence[float] = field(default_factory=lambda: [1.0, 0.1, 0.0], kw_only=True)
    """Proportional, integral and derivative gain of the multipliers of constraints. Violations count in units of the
    bound."""

    constraint_margin: Share = field(default=0.0, kw_only=True)
    """The multipliers aim below (or above) each bound by this share of it."""

    multiplier_limit: Positive = field(default=20.0, kw_only=True)
    """Largest multiplier of a constraint."""

    risk: str | None = field(default=None, kw_only=True)
    """Objective of risk: `cvar:0.1`, the mean of the worst tenth of the episode returns, or a mixture such as
    `0.5*mean+0.5*cvar:0.1`; `null`: the mean. The latest model is kept as the best one, unless
    `rollout_evaluator.keep` or `.objective` is set."""

    n_quantiles: Count = field(default=50, kw_only=True)
    """Number of quantiles of the critic, with `risk`. More of them represent rarer losses."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_choice("lr_schedule", ("constant", "linear", "cosine"))
        if self.risk is not None and self.reward_centering:
            raise ConfigError(
                "algorithm.risk: expected `reward_centering=0`, because problems without an end have no episode "
                f"returns; found {self.reward_centering}."
            )
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


class ReplayConfig(AlgorithmConfig):
    """Hyperparameters of an algorithm with a replay buffer. Subclasses make fields of these attributes, which
    :class:`~maze.train.trainers.sac.sac_algorithm_config.SACAlgorithmConfig` describes.
    """

    n_rollout_steps: Count
    rollouts_per_iteration: Count
    num_batches_per_iter: Count
    num_actors: Count
    batch_size: Count
    split_rollouts_into_transitions: bool
    replay_buffer_size: Count
    initial_buffer_size: Count
    initial_sampling_policy: Any
    collect_ahead: bool | None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.initial_buffer_size > self.replay_buffer_size:
            raise ConfigError(
                f"algorithm.initial_buffer_size: {self.initial_buffer_size} transitions do not fit into a replay "
                f"buffer of {self.replay_buffer_size} (`algorithm.replay_buffer_size`)."
            )


def algorithm_class(algorithm: Any) -> type[AlgorithmConfig] | None:
    """Return the class of an algorithm's configuration; `None` for a mapping without `_target_`.

    :param algorithm: The `algorithm` part of a configuration, or an object.
    """
    if isinstance(algorithm, AlgorithmConfig):
        return type(algorithm)
    target = algorithm.get(TARGET_KEY) if isinstance(algorithm, Mapping) else None
    return None if target is None else Factory(AlgorithmConfig).type_from_name(target, config_path="algorithm._target_")


@dataclass
class ModelConfig:
    """The model part of a training configuration."""

    policies: dict[Any, Any]
    """How policies are built."""
    critics: dict[Any, Any] | None
    """How critics are built; `None` for algorithms without."""
    distribution_mapper: dict[Any, Any]
    """Which probability distributions belong to which action spaces."""


@dataclass
class TrainConfig:
    """The parts of a training configuration."""

    env: DictConfig
    """How the environment is built."""
    model: ModelConfig
    """How policies and critics are built."""
    algorithm: AlgorithmConfig
    """Hyperparameters of the trainer."""
    runner: Runner
    """The runner."""
