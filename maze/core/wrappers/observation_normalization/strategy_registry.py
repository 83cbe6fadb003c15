"""Finding normalization strategies by name."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from maze.core.annotations import override
from maze.core.errors import ConfigError, did_you_mean
from maze.core.utils.factory import Factory
from maze.core.wrappers.observation_normalization import normalization_strategies
from maze.core.wrappers.observation_normalization.normalization_strategies.base import ObservationNormalizationStrategy


class StrategyRegistry(Factory[ObservationNormalizationStrategy]):
    """Builds strategies, which may be named by dotted path or, once their module is registered, by class name."""

    def __init__(self) -> None:
        super().__init__(ObservationNormalizationStrategy)  # type: ignore[type-abstract]  # subclasses are built
        self._by_name: dict[str, type[ObservationNormalizationStrategy]] = {}
        self.register(normalization_strategies)

    def register(self, module: Any) -> None:
        """Makes the strategies of a module known by their class names.

        :param module: Module, package of modules, or the path of either.
        :raises ConfigError: It is no module.
        """
        if isinstance(module, str):
            module = importlib.import_module(module)
        if not isinstance(module, ModuleType):
            raise ConfigError(f"Expected a module with normalization strategies, got {module!r}.")
        for member in (member for part in _modules(module) for member in vars(part).values()):
            if isinstance(member, type) and issubclass(member, ObservationNormalizationStrategy):
                self._by_name[member.__name__] = member

    def type_of(self, strategy: Any, where: str) -> type[ObservationNormalizationStrategy]:
        """The class of a strategy.

        :param strategy: Dotted path, registered class name, class or an object of it.
        :param where: Key of the configuration, for messages.
        """
        if isinstance(strategy, ObservationNormalizationStrategy):
            return type(strategy)
        return self.type_from_name(strategy, config_path=where)

    @override(Factory)
    def type_from_name(
        self, name: str | type[ObservationNormalizationStrategy], *, config_path: str = ""
    ) -> type[ObservationNormalizationStrategy]:
        if isinstance(name, str) and "." not in name:
            if name not in self._by_name:
                known = sorted(self._by_name)
                raise ConfigError(
                    f"{config_path}: there is no normalization strategy `{name}`.{did_you_mean(name, known)} Name your "
                    "own by their dotted path."
                )
            return self._by_name[name]
        return super().type_from_name(name, config_path=config_path)


def _modules(module: ModuleType) -> Iterator[ModuleType]:
    yield module
    for found in pkgutil.iter_modules(getattr(module, "__path__", ())):
        yield importlib.import_module(f"{module.__name__}.{found.name}")
