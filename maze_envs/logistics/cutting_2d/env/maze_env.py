"""The trainable environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from maze.core.env.action_conversion import ActionConversionInterface
from maze.core.env.core_env import CoreEnv
from maze.core.env.maze_env import MazeEnv
from maze.core.env.observation_conversion import ObservationConversionInterface
from maze.core.utils.factory import TARGET_KEY, CollectionOfConfigType, ConfigType, Factory
from maze_envs.logistics.cutting_2d.env.core_env import Cutting2DCoreEnvironment


class Cutting2DEnvironment(MazeEnv[CoreEnv]):
    """The cutting simulation with observations and actions, all of it from configurations.

    :param core_env: The simulation: an object, or the arguments of `Cutting2DCoreEnvironment`.
    :param action_conversion: Conversions from actions to cuts, as a list in the order of sub-steps or by step key.
    :param observation_conversion: Conversions from states to observations, in the same way.
    """

    def __init__(
        self,
        core_env: CoreEnv | ConfigType,
        action_conversion: CollectionOfConfigType,
        observation_conversion: CollectionOfConfigType,
    ) -> None:
        super().__init__(
            core_env=_built_core_env(core_env),
            action_conversion_dict=Factory(ActionConversionInterface).instantiate_collection(  # type: ignore[type-abstract]  # subclasses
                action_conversion, config_path="env.action_conversion"
            ),
            observation_conversion_dict=Factory(ObservationConversionInterface).instantiate_collection(  # type: ignore[type-abstract]  # subclasses
                observation_conversion, config_path="env.observation_conversion"
            ),
        )


def _built_core_env(core_env: Any) -> CoreEnv:
    if isinstance(core_env, Mapping) and TARGET_KEY not in core_env:
        core_env = {TARGET_KEY: Cutting2DCoreEnvironment, **core_env}
    return Factory(CoreEnv).instantiate(core_env, config_path="env.core_env")  # type: ignore[type-abstract]  # a subclass
