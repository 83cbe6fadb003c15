"""Keep the model with the best evaluation."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maze.console.runs import active_console
from maze.core.annotations import override
from maze.core.errors import CheckpointError
from maze.train.trainers.common.model_selection.model_selection_base import ModelSelectionBase

if TYPE_CHECKING:
    from maze.core.agent.torch_model import TorchModel


logger = logging.getLogger(__name__)

# Attributes that are saved as they are.
_SCORES = ("best_reward", "best_violation", "kept_reward")
_PROGRESS = (*_SCORES, "is_constrained", "maximize", "last_improvement", "n_updates")


class BestModelSelection(ModelSelectionBase):
    """Write the model whenever its evaluation is at least as good as all before, and keep a copy of these weights.

    Where there are constraints, an evaluation that fulfils them is better than any that does not; as long as none does,
    the one that comes nearest is the best.

    :param dump_file: File of the best model's weights; `None` keeps them in memory only.
    :param model: The model that is trained; `None` only keeps track of the best evaluation.
    :param dump_interval: Additionally write the current weights after every so many epochs, next to `dump_file` with
        the number of the epoch in the name. Without a trainer, evaluations count as epochs.
    :param verbose: Also print a line about evaluations that were not better.
    :raises ValueError: The interval is below 1.
    """

    def __init__(
        self, dump_file: str | None, model: TorchModel | None, dump_interval: int | None = None, verbose: bool = False
    ) -> None:
        if dump_interval is not None and dump_interval < 1:
            raise ValueError(f"`dump_interval` must be at least 1 or None, found {dump_interval}.")
        self.dump_file = Path(dump_file) if dump_file else None
        self.model = model
        self.dump_interval = dump_interval
        self.verbose = verbose
        self.best_reward = -math.inf
        self.kept_reward = -math.inf
        """Score of the kept model: the best one, or where :attr:`keeps_latest` is set the latest one."""
        self.best_violation = math.inf
        """Violation of the constraints by the best evaluation; 0: all hold."""
        self.is_constrained = False
        """Whether evaluations have constraints to fulfil."""
        self.last_improvement = 0
        """Number of evaluations since the best one."""
        self.n_updates = 0
        self._best_weights: dict[str, Any] | None = None
        self._hears_of_epochs = False

    @override(ModelSelectionBase)
    def update(self, reward: float) -> None:
        self._compare(reward, 0.0)

    @override(ModelSelectionBase)
    def update_constrained(self, reward: float, violation: float) -> None:
        self.is_constrained = True
        self._compare(reward, violation)

    @override(ModelSelectionBase)
    def training_started(self) -> None:
        self._hears_of_epochs = True

    @override(ModelSelectionBase)
    def epoch_completed(self, epoch: int) -> None:
        self._dump_numbered(epoch)

    @override(ModelSelectionBase)
    def training_ended(self) -> None:
        if self.model is None or self.best_reward > -math.inf:
            return
        logger.warning(
            "No evaluation has found a best model: the weights of the end of the run are kept as the best ones%s.",
            f", in `{self.dump_file}`" if self.dump_file is not None else "",
        )
        self._keep_current_model(self.kept_reward)

    @property
    def best_value(self) -> float:
        """The best evaluation's statistic as it is logged: the score, negated where less is better."""
        return self.best_reward if self.maximize else -self.best_reward

    def _compare(self, reward: float, violation: float) -> None:
        self.n_updates += 1
        self.last_improvement += 1
        rank, best_rank = (-violation, reward), (-self.best_violation, self.best_reward)
        if not math.isfinite(reward):
            shown = "NaN" if math.isnan(reward) else f"{reward}"
            logger.warning("The evaluation's score is %s; this model is not considered for the best one.", shown)
        elif not math.isfinite(violation):
            logger.warning("A constraint cannot be checked; this model is not considered for the best one.")
        elif rank > best_rank:
            broken = f" (constraints are violated by {violation:.5g})" if violation else ""
            self.best_reward, self.best_violation = float(reward), float(violation)
            if active_console() is None:  # which shows the best score with the epoch
                print(f"-> new overall best model {self.best_value:.5f}!{broken}")
            self.last_improvement = 0
            self._keep_current_model(reward)
        elif rank == best_rank or (self.keeps_latest and violation <= self.best_violation):
            # Where evaluations reach a ceiling, the model that was trained for longer is the more robust one. This is
            # no improvement: patience continues counting.
            self._keep_current_model(reward)
        elif self.verbose:
            print(f"-> no improvement over {self.best_value:.5f} since {self.last_improvement} evaluations.")
        if not self._hears_of_epochs:
            self._dump_numbered(self.n_updates)

    def reset_to_best(self) -> None:
        """Give the model the weights of its best evaluation again.

        :raises CheckpointError: No evaluation was good enough to be kept.
        """
        if self.model is None or self._best_weights is None:
            raise CheckpointError("There is no best model to restore: no evaluation of a model was reported yet.")
        self.model.load_state_dict(copy.deepcopy(self._best_weights))

    def state_dict(self) -> dict[str, Any]:
        """Return everything needed to continue the selection."""
        return {**{name: getattr(self, name) for name in _PROGRESS}, "best_weights": self._best_weights}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue the selection that :meth:`state_dict` was taken from.

        :param state_dict: The state. If `dump_file` does not exist, the best weights are written into it.
        """
        for name in _PROGRESS:
            setattr(self, name, state_dict[name])
        self._best_weights = state_dict["best_weights"]
        if self.dump_file is not None and self._best_weights is not None and not self.dump_file.exists():
            _save(self.dump_file, self._best_weights)  # the directory of a run that resumes another one

    def _keep_current_model(self, reward: float) -> None:
        self.kept_reward = float(reward)
        if self.model is None:
            return
        self._best_weights = _cpu_copy(self.model.state_dict())
        if self.dump_file is not None:
            _save(self.dump_file, self._best_weights)

    def _dump_numbered(self, epoch: int) -> None:
        if self.dump_interval is None or epoch % self.dump_interval or self.model is None or self.dump_file is None:
            return
        numbered = self.dump_file.with_stem(f"{self.dump_file.stem}-epoch_{epoch}")
        _save(numbered, _cpu_copy(self.model.state_dict()))


def _save(file: Path, state: Any) -> None:
    from maze.core.utils.checkpoint import save_state  # rollouts compare scores, and need no torch

    save_state(file, state)


def _cpu_copy(state: Any) -> Any:
    """Return a deep copy with all tensors on the CPU, detached from the ones that are trained."""
    from torch import Tensor

    from maze.train.utils.train_utils import mapped

    return mapped(
        lambda each: each.detach().to("cpu", copy=True) if isinstance(each, Tensor) else copy.deepcopy(each), state
    )


class BestScore(float):
    """The statistic or KPI of the evaluation of a run's kept model, as it is logged.

    :param value: The number.
    :param violation: Violation of the constraints by that evaluation; `None`: no constraints.
    :param maximize: Whether more of it is better.
    """

    violation: float | None
    maximize: bool

    def __new__(cls, value: float, violation: float | None = None, maximize: bool = True) -> BestScore:
        score = super().__new__(cls, value)
        score.violation, score.maximize = violation, maximize
        return score


def best_score(runner: Any) -> BestScore | None:
    """Return the score of the kept model of a run; `None` for other jobs, and where no evaluation was finite.

    :param runner: The runner of the run.
    """
    return selected_score(getattr(getattr(runner, "trainer", None), "model_selection", None))


def selected_score(selection: Any) -> BestScore | None:
    """Return how good the kept model of a selection is; `None`: it has none. Own selections may have a best one."""
    reward = getattr(selection, "kept_reward", getattr(selection, "best_reward", None))
    if reward is None or not math.isfinite(reward):
        return None
    maximize = bool(getattr(selection, "maximize", True))
    violation = selection.best_violation if getattr(selection, "is_constrained", False) else None
    return BestScore(reward if maximize else -reward, violation, maximize)
