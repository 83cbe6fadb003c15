"""Learning rates over the course of a training."""

from __future__ import annotations

import math

LR_SCHEDULES = ("constant", "linear", "cosine")


def scheduled_lr(schedule: str, initial_lr: float, progress: float) -> float:
    """The learning rate after a share ``progress`` (0 to 1) of all updates.

    >>> scheduled_lr("linear", 0.1, 0.75)
    0.025
    """
    progress = min(max(progress, 0.0), 1.0)
    if schedule == "constant":
        return initial_lr
    if schedule == "linear":
        return initial_lr * (1.0 - progress)
    if schedule == "cosine":
        return initial_lr * 0.5 * (1.0 + math.cos(math.pi * progress))
    raise ValueError(f"Unknown learning rate schedule `{schedule}`; there are {', '.join(LR_SCHEDULES)}.")
