"""The cutting problem with two sub-steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from maze.core.annotations import override
from maze.core.env.maze_action import MazeActionType
from maze.core.env.maze_env import MazeEnv
from maze.core.env.maze_state import MazeStateType
from maze.core.env.simulated_env_mixin import Future
from maze.core.env.structured_env import ActorID, StepKeyType, StructuredEnv
from maze.core.env.structured_env_spaces_mixin import StructuredEnvSpacesMixin
from maze.core.errors import EnvironmentContractError
from maze.core.wrappers.wrapper import ObservationsAndActions, Wrapper

from .maze_env import maze_env_factory

Observation = dict[str, np.ndarray]
StepResult = tuple[Observation, float, bool, dict[Any, Any]]

SELECTION, CUTTING = 0, 1


class StructuredCutting2DEnvironment(Wrapper[MazeEnv[Any]], StructuredEnv, StructuredEnvSpacesMixin):
    """Divide a step of the flat environment in two: first a piece is selected, then it is cut.

    The second sub-step sees only the selected piece and the order, and gets the reward of the whole step.

    :param maze_env: The flat environment.
    """

    def __init__(self, maze_env: MazeEnv[Any]) -> None:
        Wrapper.__init__(self, maze_env)
        flat_actions, flat_observations = maze_env.action_space, maze_env.observation_space
        self._action_spaces_dict: dict[StepKeyType, spaces.Dict] = {
            SELECTION: spaces.Dict({"piece_idx": flat_actions["piece_idx"]}),
            CUTTING: spaces.Dict({key: flat_actions[key] for key in ("cut_rotation", "cut_order")}),
        }
        self._observation_spaces_dict: dict[StepKeyType, spaces.Dict] = {
            SELECTION: spaces.Dict(flat_observations.spaces),
            CUTTING: spaces.Dict(
                {
                    "selected_piece": flat_observations["ordered_piece"],
                    "ordered_piece": flat_observations["ordered_piece"],
                }
            ),
        }
        self._sub_step_key = SELECTION
        self._flat_obs: Observation = {}
        self._action_0: dict[str, Any] = {}
        self._last_reward: float | None = None

    @override(Wrapper)
    def step(self, action: dict[str, Any]) -> StepResult:
        if self._sub_step_key == SELECTION:
            self._sub_step_key = CUTTING
            return self._selection_step(action)
        self._sub_step_key = SELECTION
        return self._cutting_step(action)

    @override(Wrapper)
    def reset(self) -> Observation:
        self._flat_obs = self.env.reset()
        self._sub_step_key = SELECTION
        self._last_reward = None
        return self._obs_selection_step(self._flat_obs)

    def _selection_step(self, action: dict[str, Any]) -> StepResult:
        self._action_0 = action
        return self._obs_cutting_step(self._flat_obs, int(action["piece_idx"])), 0.0, False, {}

    def _cutting_step(self, action: dict[str, Any]) -> StepResult:
        self._flat_obs, self._last_reward, done, info = self.env.step({**self._action_0, **action})
        return self._obs_selection_step(self._flat_obs), self._last_reward, done, info

    @staticmethod
    def _obs_selection_step(flat_obs: Observation) -> Observation:
        """What is observed before a piece is selected."""
        return dict(flat_obs)

    @staticmethod
    def _obs_cutting_step(flat_obs: Observation, selected_piece_idx: int) -> Observation:
        """What is observed before the selected piece is cut."""
        return {
            "selected_piece": flat_obs["inventory"][selected_piece_idx],
            "ordered_piece": flat_obs["ordered_piece"],
        }

    @override(StructuredEnv)
    def actor_id(self) -> ActorID:
        return ActorID(step_key=self._sub_step_key, agent_id=0)

    @override(StructuredEnv)
    def get_actor_rewards(self) -> np.ndarray | None:
        """Half of the reward for each of the two actors: only together they save raw pieces."""
        return None if self._last_reward is None else np.full(2, self._last_reward / 2.0)

    @property
    @override(StructuredEnv)
    def agent_counts_dict(self) -> dict[StepKeyType, int]:
        return {SELECTION: 1, CUTTING: 1}

    @override(StructuredEnv)
    def is_actor_done(self) -> bool:
        return False

    @property
    @override(StructuredEnvSpacesMixin)
    def action_space(self) -> spaces.Dict:
        return self._action_spaces_dict[self._sub_step_key]

    @property
    @override(StructuredEnvSpacesMixin)
    def observation_space(self) -> spaces.Dict:
        return self._observation_spaces_dict[self._sub_step_key]

    @property
    @override(StructuredEnvSpacesMixin)
    def action_spaces_dict(self) -> dict[StepKeyType, spaces.Dict]:
        return self._action_spaces_dict

    @property
    @override(StructuredEnvSpacesMixin)
    def observation_spaces_dict(self) -> dict[StepKeyType, spaces.Dict]:
        return self._observation_spaces_dict

    @override(StructuredEnv)
    def seed(self, seed: Any = None) -> None:
        self.env.seed(seed)

    @override(StructuredEnv)
    def close(self) -> None:
        self.env.close()

    @override(Wrapper)
    def clone_from(self, env: StructuredCutting2DEnvironment, future: Future = "same") -> None:
        super().clone_from(env, future)
        self._sub_step_key = env._sub_step_key
        self._flat_obs = env._flat_obs
        self._action_0 = env._action_0
        self._last_reward = env._last_reward

    @override(Wrapper)
    def get_observation_and_action_dicts(
        self, maze_state: MazeStateType | None, maze_action: MazeActionType | None, first_step_in_episode: bool
    ) -> ObservationsAndActions:
        """Divide a recorded step of the flat environment; needs both its state and its action."""
        if maze_state is None or maze_action is None:
            raise EnvironmentContractError(
                f"{type(self).__name__}: state and action are needed together, because the observation of sub-step "
                f"{CUTTING} depends on the piece selected before it; found {maze_state!r} and {maze_action!r}."
            )
        observations, actions = self.env.get_observation_and_action_dicts(
            maze_state, maze_action, first_step_in_episode
        )
        assert observations is not None
        assert actions is not None
        (flat_obs,), (flat_action,) = observations.values(), actions.values()
        return (
            {
                SELECTION: self._obs_selection_step(flat_obs),
                CUTTING: self._obs_cutting_step(flat_obs, flat_action["piece_idx"]),
            },
            {key: {name: flat_action[name] for name in space} for key, space in self._action_spaces_dict.items()},
        )


def struct_env_factory(
    max_pieces_in_inventory: int, raw_piece_size: tuple[int, int], static_demand: Sequence[tuple[int, int]]
) -> StructuredCutting2DEnvironment:
    """Build the structured environment from the parameters of the simulation, see `Cutting2DCoreEnvironment`."""
    return StructuredCutting2DEnvironment(maze_env_factory(max_pieces_in_inventory, raw_piece_size, static_demand))
