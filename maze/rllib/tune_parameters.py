"""When a training with RLlib stops and what it keeps: `runner.tune_config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from maze.core.errors import ConfigError, did_you_mean
from maze.rllib.statistics import value_at

_SHORT_NAMES = {
    "episode_reward_mean": "env_runners/episode_return_mean",
    "episode_return_mean": "env_runners/episode_return_mean",
    "timesteps_total": "env_runners/num_env_steps_sampled_lifetime",
    "num_env_steps_sampled_lifetime": "env_runners/num_env_steps_sampled_lifetime",
    "episodes_total": "env_runners/num_episodes_lifetime",
}


@dataclass(frozen=True)
class TuneParameters:
    """The part of Ray Tune's vocabulary that one training needs.

    :param stop: The training stops as soon as one of these values of a result is reached: `training_iteration`,
        `timesteps_total`, `time_total_s`, `episode_return_mean` or any path such as
        `env_runners/episode_len_mean`. Empty: only an interrupt stops it.
    :param checkpoint_freq: Write a checkpoint of Ray's after every so many iterations; 0: only at the end.
    :param checkpoint_at_end: Write one at the end.
    :param keep_all_checkpoints: Keep the earlier ones too.
    :param verbose: 0: no line after each iteration.
    """

    stop: Mapping[str, float] = field(default_factory=dict)
    checkpoint_freq: int = 0
    checkpoint_at_end: bool = True
    keep_all_checkpoints: bool = False
    verbose: int = 1

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | None) -> TuneParameters:
        """Checks a configuration.

        :raises ConfigError: Names the key.
        """
        config = dict(config or {})
        known = [entry.name for entry in fields(cls)]
        for key in config:
            if key not in known:
                raise ConfigError(
                    f"runner.tune_config.{key}: unknown key.{did_you_mean(str(key), known)} Known: {', '.join(known)}."
                )
        stop = {key: value for key, value in (config.pop("stop", None) or {}).items() if value is not None}
        for key, value in stop.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ConfigError(f"runner.tune_config.stop.{key}: expected a number, got {value!r}.")
        frequency = config.get("checkpoint_freq", 0)
        if isinstance(frequency, bool) or not isinstance(frequency, int) or frequency < 0:
            raise ConfigError(f"runner.tune_config.checkpoint_freq: expected a whole number from 0, got {frequency!r}.")
        return cls(stop=stop, **config)

    def reason_to_stop(self, result: Mapping[str, Any], iteration: int) -> str:
        """Which condition holds, or an empty text.

        :param result: The result of an iteration.
        :param iteration: Its number.
        :raises ConfigError: A condition names what no result has.
        """
        for name, limit in self.stop.items():
            if name == "training_iteration":
                value: float | None = iteration
            else:
                value = value_at(result, _SHORT_NAMES.get(name, name))
            if value is None and name not in _SHORT_NAMES:
                available = [*_SHORT_NAMES, *(key for key in result if value_at(result, key) is not None)]
                raise ConfigError(
                    f"runner.tune_config.stop.{name}: RLlib reports no such number.{did_you_mean(name, available)} "
                    f"Some of those it does: {', '.join(sorted(available)[:20])}."
                )
            if value is not None and value >= limit:
                return f"{name} has reached {limit:g}"
        return ""

    def is_checkpoint_due(self, iteration: int) -> bool:
        """Whether a checkpoint is to be written after this iteration."""
        return bool(self.checkpoint_freq) and iteration % self.checkpoint_freq == 0
