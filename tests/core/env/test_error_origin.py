"""An error in the code of an environment's author names class and method, whatever the action was."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from maze.core.env.reward import RewardAggregatorInterface
from maze.core.errors import EnvironmentContractError
from maze.core.log_stats.log_stats import StatsContext
from maze.core.wrappers.log_stats_wrapper import LogStatsWrapper
from maze.core.wrappers.wrapper import ActionWrapper, ObservationWrapper, RewardWrapper
from maze.train.parallelization.vector_env.sequential_vector_env import SequentialVectorEnv
from tests.core.log_stats.stats_test_env import Actions, CuttingCoreEnv, Observations, RawPieceUsage, act, cutting_env

FINE, ODD = act(1, 1), {"piece_idx": np.int64(99), "cut_order": np.int64(1)}
"""An action of the space, and one that is none but that the simulation does not mind."""

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have no notes before Python 3.11")


class Broken(RewardAggregatorInterface):
    def summarize_reward(self, maze_state=None):
        return {}["weight"]


class RewardedCoreEnv(CuttingCoreEnv):
    def __init__(self):
        super().__init__()
        self.aggregator = Broken()

    def step(self, maze_action):
        state, _, done, info = super().step(maze_action)
        return state, self.aggregator.summarize_reward(state), done, info


class BrokenKpis(RawPieceUsage):
    def calculate_kpis(self, episode_event_log, last_maze_state):
        return self._share()

    def _share(self):
        return {}["weight"]


class BrokenObservations(Observations):
    def maze_to_space(self, maze_state):
        return {}["weight"]


class BrokenActions(Actions):
    def space_to_maze(self, action, maze_state):
        return {}["weight"]


def with_core_env(core_env, **conversions):
    env = cutting_env()
    env.core_env = core_env
    return env


def with_conversion(kind, conversion):
    env = cutting_env()
    getattr(env, kind)[0] = conversion
    env._bind()
    return env


class BrokenObservationWrapper(ObservationWrapper):
    def observation(self, observation):
        return {}["weight"]


class BrokenRewardWrapper(RewardWrapper):
    def reward(self, reward):
        return {}["weight"]


class BrokenActionWrapper(ActionWrapper):
    def action(self, action):
        return {}["weight"]

    def reverse_action(self, action):
        return action


def kpi_env():
    env = cutting_env(episode_length=1)
    env.core_env.kpi_calculator = BrokenKpis()
    return env


BROKEN = {
    "Broken.summarize_reward": lambda: with_core_env(RewardedCoreEnv()),
    "BrokenKpis.calculate_kpis": kpi_env,
    "BrokenObservations.maze_to_space": lambda: with_conversion("observation_conversion_dict", BrokenObservations()),
    "BrokenActions.space_to_maze": lambda: with_conversion("action_conversion_dict", BrokenActions(piece_idx=5)),
    "BrokenObservationWrapper.observation": lambda: BrokenObservationWrapper.wrap(cutting_env()),
    "BrokenRewardWrapper.reward": lambda: BrokenRewardWrapper.wrap(cutting_env()),
    "BrokenActionWrapper.action": lambda: BrokenActionWrapper.wrap(cutting_env()),
}


@pytest.fixture(autouse=True)
def statistics_of_their_own():
    """Failed steps leave no unfinished statistics for later tests."""
    with StatsContext():
        yield


@pytest.mark.parametrize("origin", BROKEN)
@pytest.mark.parametrize("action", [FINE, ODD], ids=["fine", "odd"])
def test_an_error_keeps_its_type_and_names_class_and_method(origin, action):
    env = LogStatsWrapper.wrap(BROKEN[origin]())

    def play():
        env.reset()
        env.step(action)
        env.reset()

    if action is ODD and origin == "BrokenActions.space_to_maze":
        # Either may be at fault: the message names both.
        with pytest.raises(
            EnvironmentContractError, match=r"`piece_idx`.*BrokenActions\.space_to_maze raised KeyError"
        ):
            play()
        return
    with pytest.raises(KeyError, match="weight") as caught:
        play()
    (note,) = caught.value.__notes__
    assert note.startswith(f"Raised by {origin}")


@pytest.mark.parametrize("origin", BROKEN)
def test_vector_environments_pass_the_names_on(origin):
    env = SequentialVectorEnv([BROKEN[origin]])

    def play():
        env.reset()
        env.step({name: np.array([value]) for name, value in FINE.items()})

    with pytest.raises(Exception, match="weight") as caught:
        play()
    error: BaseException | None = caught.value
    notes = []
    while error is not None:
        notes += [*getattr(error, "__notes__", ()), str(error)]
        error = error.__cause__
    assert any(origin in note for note in notes), notes


def test_an_action_out_of_its_space_is_blamed_where_the_simulation_fails():
    env = cutting_env()
    env.reset()
    with pytest.raises(EnvironmentContractError, match=r"cut_order.*CuttingCoreEnv\.step raised KeyError"):
        env.step({"piece_idx": np.int64(1)})
