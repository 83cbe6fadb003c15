"""Documented path of :mod:`maze.evaluation.replay`."""

from __future__ import annotations

from maze.evaluation.replay import RewardReplay, WhatIf, replayed_measures, replayed_rewards, reward_replay, what_if

__all__ = ["RewardReplay", "WhatIf", "replayed_measures", "replayed_rewards", "reward_replay", "what_if"]
