"""Pre-processing of observations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces

from maze.core.annotations import override
from maze.core.env.maze_env import MazeEnv
from maze.core.env.structured_env import StepKeyType
from maze.core.errors import ConfigError
from maze.core.utils.factory import TARGET_KEY, Factory
from maze.core.wrappers.observation_preprocessing.preprocessors.base import PreProcessor
from maze.core.wrappers.wrapper import Observation, SubstepObservationWrapper, checked_entry, known_spaces


class _Stage(NamedTuple):
    """A pre-processor applied to one sub-step."""

    source: str
    target: str
    process: Callable[[Any], np.ndarray]
    keeps_original: bool


class PreProcessingWrapper(SubstepObservationWrapper):
    """Convert observations with pre-processors, one after the other, and their spaces with them.

    Each entry of the mapping adds the observation `<name>-<tag>`, which later entries may convert further. It applies
    to all sub-steps that have the observation.

    :param env: The environment to wrap.
    :param pre_processor_mapping: One mapping for each pre-processor, in their order: `observation` (name),
        `_target_` (class, for instance `maze.preprocessors.FlattenPreProcessor`), `keep_original` (by default the
        converted observation takes the original's place) and `config` (arguments of the class).
    :raises ConfigError: The mapping names an unknown observation, or a pre-processor that does not fit it.
    """

    def __init__(self, env: MazeEnv[Any], pre_processor_mapping: list[dict[str, Any]]) -> None:
        super().__init__(env)
        step_spaces = {key: dict(space.spaces) for key, space in env.observation_spaces_dict.items()}
        self.stages: dict[StepKeyType, list[_Stage]] = {key: [] for key in step_spaces}
        """The pre-processing of each sub-step, in order."""
        self.preprocessors: dict[StepKeyType, list[tuple[str, PreProcessor]]] = {key: [] for key in step_spaces}
        """By sub-step key the names of converted observations with their pre-processors, in the order of conversion."""
        for index, entry in enumerate(pre_processor_mapping):
            self._add(entry, f"pre_processor_mapping[{index}]", step_spaces)
        self.observation_spaces_dict = {key: spaces.Dict(entries) for key, entries in step_spaces.items()}

    @override(SubstepObservationWrapper)
    def substep_observation(self, observation: Observation, step_key: StepKeyType) -> Observation:
        processed = dict(observation)
        for source, target, process, keeps_original in self.stages[step_key]:
            processed[target] = process(processed[source] if keeps_original else processed.pop(source))
        return processed

    def _add(self, entry: Any, where: str, step_spaces: dict[StepKeyType, dict[str, spaces.Space[Any]]]) -> None:
        """Apply an entry of the mapping to all sub-steps with its observation, and update their spaces."""
        checked_entry(entry, where, ("observation", TARGET_KEY), ("keep_original", "config"))
        factory: Factory[PreProcessor] = Factory(PreProcessor)  # type: ignore[type-abstract]  # a subclass is built
        name, keeps_original = str(entry["observation"]), bool(entry.get("keep_original", False))
        for step_key, original in known_spaces(step_spaces, name, where, "observation").items():
            entries = step_spaces[step_key]
            config = {TARGET_KEY: entry[TARGET_KEY], "observation_space": original, **(entry.get("config") or {})}
            try:
                processor = factory.instantiate(config)
            except ConfigError as error:
                raise ConfigError(f"{where}: observation `{name}`: {error}") from error
            if not keeps_original:
                del entries[name]
            target = f"{name}-{processor.tag()}"
            if target in entries:
                raise ConfigError(f"{where}: sub-step {step_key!r} already has an observation `{target}`.")
            entries[target] = processor.processed_space()
            self.stages[step_key].append(_Stage(name, target, processor.process, keeps_original))
            self.preprocessors[step_key].append((name, processor))
