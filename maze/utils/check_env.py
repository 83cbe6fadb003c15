"""Environment checker: finds faults of structured environments before training.

>>> from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
>>> check_env(lambda: GymMazeEnv("CartPole-v1"), n_steps=20).findings
[]
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from maze.core.env.maze_env import MazeEnv
from maze.core.errors import EnvironmentContractError
from maze.core.utils.config_utils import EnvFactory
from maze.core.wrappers.maze_gym_env_wrapper import env_name
from maze.utils.env_checks.acting import (
    CheckReport,
    Subject,
    check_cloning,
    check_determinism,
    check_futures,
    check_pickling,
)
from maze.utils.env_checks.step_checks import IsInvalid, check_declarations, check_masks, check_steps, looks_invalid


def check_env(
    env: Any | Callable[[], Any],
    n_steps: int = 200,
    seed: int = 1234,
    masks: Mapping[str, str] | None = None,
    is_invalid: IsInvalid = looks_invalid,
    raise_on_findings: bool = False,
) -> CheckReport:
    """Take random actions in an environment and compare its behaviour with the contract.

    Checked are actors and their order, spaces and observations, rewards, `done` and `info`, determinism under a
    seed, pickling, cloning and new futures of clones, the round trips of conversions, and action masks.

    :param env: The environment with its wrappers, or a class, a function, a configuration or an id that makes one. The
        state of a given environment is undefined afterwards.
    :param n_steps: Sub-steps to take.
    :param seed: Seed of environment and actions.
    :param masks: Action head of each mask that its size does not determine.
    :param is_invalid: Whether the action of a step (environment, reward, info) was invalid. By default: the info has an
        entry `error`, or an event with `invalid` in its name was fired.
    :param raise_on_findings: Raise an :class:`EnvironmentContractError` with all findings.
    """
    is_made = isinstance(env, type | str | Mapping) or (callable(env) and not hasattr(env, "step"))
    make_env = EnvFactory(env if is_made else _copies_of(env))
    report = CheckReport(str(_name_of(make_env())))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the warnings of environments are about faults that are checked below
        env = make_env()
        if check_declarations(report, env):
            subject = Subject(report, make_env, n_steps, seed, dict(masks or {}))
            if check_steps(subject, env):
                check_determinism(subject)
                check_pickling(subject)
                if check_cloning(subject):
                    check_futures(subject)
                    check_masks(subject, is_invalid)
        env.close()
    if raise_on_findings and report.findings:
        raise EnvironmentContractError(str(report))
    return report


def _copies_of(env: Any) -> Callable[[], Any]:
    def make_env() -> Any:
        try:
            return copy.deepcopy(env)
        except Exception as error:
            raise EnvironmentContractError(
                f"{_name_of(env)} cannot be copied ({type(error).__name__}: {error}). "
                "Pass a function that makes the environment."
            ) from error

    return make_env


def _name_of(env: Any) -> str:
    """Return the id or class of the environment inside all wrappers."""
    while "_wrapped_env" in getattr(env, "__dict__", {}) and hasattr(env.env, "action_spaces_dict"):
        env = env.env
    return env_name(env) if isinstance(env, MazeEnv) else type(env).__name__
