"""What an editor knows of a RunContext. Nothing runs here: `make check` has mypy read it."""

from __future__ import annotations

from typing import Any

import pandas as pd
from typing_extensions import assert_type

from maze.api.run_context import RunContext
from maze.api.training_run import Evaluation, RunResult
from maze.core.agent.torch_policy import TorchPolicy
from maze.evaluation.comparison import Comparison


def trained_in_two_lines() -> None:
    rc = RunContext("CartPole-v1", algorithm="ppo")
    result = rc.train(n_steps=100_000)

    assert_type(rc, RunContext)
    assert_type(result, RunResult | Any)
    assert_type(rc.results, RunResult | Any)
    assert_type(rc.evaluate(n_episodes=10), Evaluation | Any)
    assert_type(rc.compare(n_episodes=10), Comparison | Any)
    assert_type(rc.rollout(n_episodes=10), pd.DataFrame | Any)
    assert_type(rc.policy, TorchPolicy | Any)
    assert_type(RunContext.load("outputs/name/time"), RunContext)

    rc.train(n_steps="many")  # type: ignore[arg-type]  # and names the error
    rc.evaluate(n_episodes=10, deterministic=1.5)  # type: ignore[arg-type]


def used_without_telling_one_run_from_several(rc: RunContext) -> None:
    print(rc.train().best_score, rc.evaluate().mean_reward, rc.results.history)
