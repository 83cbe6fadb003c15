"""What trainings are compared by."""

from __future__ import annotations

import math
from typing import Any


class BestScore(float):
    """The statistic or KPI of a training's best evaluation, as it is logged.

    :param value: The number.
    :param violation: How far that evaluation is from fulfilling its constraints; ``None``: it had none.
    :param maximize: Whether more of it is better.
    """

    violation: float | None
    maximize: bool

    def __new__(cls, value: float, violation: float | None = None, maximize: bool = True) -> BestScore:
        score = super().__new__(cls, value)
        score.violation, score.maximize = violation, maximize
        return score


def best_score(runner: Any) -> BestScore | None:
    """How good the model is that a training has kept; ``None`` for other jobs, and where no evaluation was finite.

    :param runner: What ran the training.
    """
    selection: Any = getattr(getattr(runner, "trainer", None), "model_selection", None)
    reward = getattr(selection, "best_reward", None)
    if reward is None or not math.isfinite(reward):
        return None
    maximize = bool(getattr(selection, "maximize", True))
    violation = selection.best_violation if getattr(selection, "is_constrained", False) else None
    return BestScore(reward if maximize else -reward, violation, maximize)
