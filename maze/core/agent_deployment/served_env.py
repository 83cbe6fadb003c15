"""Exchanges the simulation under a stack of wrappers, and puts it back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from gymnasium import spaces

from maze.core.agent_deployment.external_core_env import DeploymentError, ExternalCoreEnv
from maze.core.agent_deployment.maze_action_candidates import (
    ActionCandidates,
    ActionConversionCandidatesInterface,
)
from maze.core.annotations import override
from maze.core.env.core_env import CoreEnv
from maze.core.env.maze_state import MazeStateType
from maze.core.env.observation_conversion import ObservationConversionInterface
from maze.core.errors import EnvironmentContractError, MazeError, NonFiniteError
from maze.core.wrappers.monitoring_wrapper import base_maze_env
from maze.core.wrappers.wrapper import ActionWrapper

Watch = Callable[[Any, Mapping[str, Any]], None]
"""Is told of a sub-step's observations."""


class ServedEnv:
    """An environment whose simulation is replaced until :meth:`restore`.

    :param env: The environment with all its wrappers.
    :raises DeploymentError: Another deployment uses the environment.
    """

    def __init__(self, env: Any) -> None:
        self.env = env
        self.maze_env = base_maze_env(env)
        self.simulation: CoreEnv = self.maze_env.core_env
        self._undo: list[Callable[[], None]] = []
        if isinstance(self.simulation, ExternalCoreEnv):
            raise DeploymentError(
                f"{self.maze_env!r} is in use by another deployment. Close that one first, or make an environment "
                f"for each deployment."
            )

    def replace_simulation(self, core_env: ExternalCoreEnv, num_candidates: int, watch: Watch | None = None) -> None:
        """Puts another core environment below the wrappers; conversions learn to deal with candidates, if need be."""
        maze_env = self.maze_env
        actions, observations = maze_env.action_conversion_dict, maze_env.observation_conversion_dict

        def put_back() -> None:
            maze_env.action_conversion_dict, maze_env.observation_conversion_dict = actions, observations
            self._set_core_env(self.simulation)

        self._undo.append(put_back)
        maze_env.observation_conversion_dict = {
            key: _StateConversion(conversion, type(maze_env).__name__, key, watch)
            for key, conversion in observations.items()
        }
        if num_candidates > 1:
            maze_env.action_conversion_dict = {
                key: ActionConversionCandidatesInterface(conversion) for key, conversion in actions.items()
            }
            for layer in self._layers():
                if issubclass(type(layer), ActionWrapper):
                    self._apply_to_each_candidate(layer)
        self._set_core_env(core_env)

    def restore(self) -> None:
        """Puts everything back as it was."""
        while self._undo:
            self._undo.pop()()

    def _layers(self) -> list[Any]:
        """The wrappers around the Maze environment, innermost first."""
        layers: list[Any] = []
        env = self.env
        while env is not self.maze_env:
            layers.insert(0, env)
            env = env.env
        return layers

    def _set_core_env(self, core_env: CoreEnv) -> None:
        self.maze_env.core_env = core_env
        for layer in self._layers():
            layer.env = layer.env  # wrappers hold on to methods of what they wrap; assigning makes them look again

    def _apply_to_each_candidate(self, wrapper: Any) -> None:
        convert = wrapper.action

        def convert_each(action: Any) -> Any:
            if not isinstance(action, ActionCandidates):
                return convert(action)
            return ActionCandidates(([convert(one) for one in action.candidates], action.probabilities))

        wrapper.__dict__["action"] = convert_each
        self._undo.append(lambda: wrapper.__dict__.pop("action", None))


class _StateConversion(ObservationConversionInterface):
    """Converts states from outside, each of which may be anything.

    :param conversion: The conversion of the environment.
    :param environment: Its name.
    :param step_key: The sub-step.
    :param watch: Is told of each observation.
    """

    def __init__(
        self, conversion: ObservationConversionInterface, environment: str, step_key: Any, watch: Watch | None
    ) -> None:
        self.conversion = conversion
        self.place = f"{environment}, sub-step {step_key!r}"
        self._step_key, self._watch = step_key, watch
        self._convert = conversion.maze_to_space
        space: Any = conversion.space()
        entries = space.spaces if isinstance(space, spaces.Dict) else {}
        self._shapes = [(key, entry.shape) for key, entry in entries.items() if entry.shape is not None]

    @override(ObservationConversionInterface)
    def maze_to_space(self, maze_state: MazeStateType) -> Any:
        try:
            observation = self._convert(maze_state)
            for key, shape in self._shapes:
                array = np.asarray(observation[key])
                if array.shape != shape:
                    raise ValueError(f"observation `{key}` has the shape {array.shape}, expected {shape}")
                if array.dtype.kind == "f" and not np.isfinite(array).all():
                    raise NonFiniteError(f"{self.place}: observation `{key}` is not finite: {array}.")
        except MazeError:
            raise
        except Exception as error:
            raise EnvironmentContractError(
                f"{self.place}: {type(self.conversion).__name__} cannot convert a state of type "
                f"{type(maze_state).__name__} ({type(error).__name__}: {error}). {_hint(maze_state)}"
            ) from error
        if self._watch is not None:
            self._watch(self._step_key, observation)
        return observation

    @override(ObservationConversionInterface)
    def space_to_maze(self, observation: Any) -> MazeStateType:
        return self.conversion.space_to_maze(observation)

    @override(ObservationConversionInterface)
    def space(self) -> spaces.Dict:
        return self.conversion.space()


def _hint(maze_state: MazeStateType) -> str:
    if isinstance(maze_state, tuple) and len(maze_state) == 2 and isinstance(maze_state[1], dict):
        return "This looks like (observation, info), as gymnasium's reset() gives them; pass the observation."
    return "States have to be what the simulation gives that the agent was made for."
