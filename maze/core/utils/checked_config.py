"""Base of configuration dataclasses with checks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, TypeVar

from maze.core.errors import ConfigError, ConfigValueError, did_you_mean
from maze.core.utils.config_utils import whole_number
from maze.core.utils.factory import TARGET_KEY

ConfigType = TypeVar("ConfigType", bound="CheckedConfig")


@dataclasses.dataclass
class CheckedConfig:
    """Base of dataclasses that are built from a section of a configuration; errors name the key of a field."""

    section: ClassVar[str] = ""
    """Key of the section."""

    @classmethod
    def from_config(cls: type[ConfigType], config: ConfigType | Mapping[str, Any]) -> ConfigType:
        """Return the configuration itself, or build one from a mapping such as a section of a composed config.

        :param config: Field names and values; missing fields keep their defaults.
        :raises ConfigError: It is no mapping, or has an unknown field.
        """
        if isinstance(config, cls):
            return config
        if not isinstance(config, Mapping):
            raise ConfigError(
                f"{cls.section}: expected a {cls.__name__} or a mapping of its fields, got {type(config).__name__}."
            )
        values = {str(key): value for key, value in config.items() if key != TARGET_KEY}
        known = [field.name for field in dataclasses.fields(cls)]
        for key in values:
            if key not in known:
                hint = did_you_mean(key, known, f"{cls.section}.{{}}") or f" Known fields: {', '.join(known)}."
                raise ConfigError(f"{cls.section}.{key}: {cls.__name__} has no such field.{hint}")
        return cls(**values)

    def require_integer(self, *names: str, minimum: int) -> None:
        """Raise a `ConfigError` unless the fields are integers of at least `minimum`."""
        for name in names:
            whole_number(f"{self.section}.{name}", getattr(self, name), minimum)

    def require_number(
        self, name: str, minimum: float, maximum: float = math.inf, *, above: bool = False, below: bool = False
    ) -> None:
        """Raise a `ConfigError` unless the field is a finite number in the given range.

        :param name: Name of the field.
        :param minimum: Smallest number allowed.
        :param maximum: Largest number allowed.
        :param above: Whether `minimum` itself is excluded.
        :param below: Whether `maximum` itself is excluded.
        """
        value = getattr(self, name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if is_number:
            is_number = (value > minimum if above else value >= minimum) and (
                value < maximum if below else value <= maximum
            )
        if not is_number:
            lower = f"{'above' if above else 'of at least'} {minimum:g}"
            upper = "" if maximum == math.inf else f" and {'below' if below else 'at most'} {maximum:g}"
            raise ConfigValueError(f"{self.section}.{name}: expected a number {lower}{upper}, got {value!r}.")

    def require_choice(self, name: str, choices: Collection[Any]) -> None:
        """Raise a `ConfigError` unless the field is one of `choices`."""
        value = getattr(self, name)
        if value not in choices:
            known = ", ".join(map(str, choices))
            raise ConfigValueError(f"{self.section}.{name}: expected one of {known}, got {value!r}.")
