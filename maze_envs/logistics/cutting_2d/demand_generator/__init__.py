"""Orders of customers: generators of orders, and their construction from configurations."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from typing_extensions import Self

from maze.core.annotations import override
from maze.core.errors import ConfigError, did_you_mean
from maze.core.utils.factory import ConfigType, Factory
from maze_envs.logistics.cutting_2d.env.maze_state import Size

SHORT_NAMES = {
    "mixed_periodic": f"{__name__}.mixed_periodic.MixedPeriodicDemandGenerator",
    "static": f"{__name__}.static.StaticDemandGenerator",
    "uniform": f"{__name__}.uniform.UniformDemandGenerator",
}


class DemandGenerator(ABC):
    """State which piece is ordered in each step. Draw from a generator of its own."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng()

    def seed(self, seed: Any) -> None:
        """Restart the random generator."""
        self.rng = np.random.default_rng(seed)

    def copy(self) -> Self:
        """Return a generator with the same future orders; that of the current episode continues."""
        return copy.deepcopy(self)

    def new_future(self, seed: int) -> None:
        """Replace the future orders of the running episode, also those that are drawn in advance.

        :param seed: Generators in the same state draw the same orders with the same seed.
        """
        self.seed(seed)

    @abstractmethod
    def reset(self) -> None:
        """Begin a new episode."""

    @abstractmethod
    def next_order(self) -> Size:
        """Return the order of the coming step."""


class _DemandGeneratorFactory(Factory[DemandGenerator]):
    @override(Factory)
    def type_or_function(self, name: str, config_path: str = "") -> Any:
        if "." not in name and name not in SHORT_NAMES:
            hint = did_you_mean(name, SHORT_NAMES)
            raise ConfigError(
                f"{config_path}: there is no demand generator `{name}`.{hint} Known: {sorted(SHORT_NAMES)}; name your "
                "own by their dotted path."
            )
        return super().type_or_function(SHORT_NAMES.get(name, name), config_path)


def build_demand_generator(config: DemandGenerator | ConfigType, raw_piece_size: Size) -> DemandGenerator:
    """Build a demand generator.

    :param config: The object, or its configuration with a short name (`mixed_periodic`, `static`, `uniform`) or a
        dotted path as `_target_`.
    :param raw_piece_size: Size of a raw piece, an argument of all generators.
    """
    factory = _DemandGeneratorFactory(DemandGenerator)  # type: ignore[type-abstract]  # a subclass
    if isinstance(config, DemandGenerator):
        return config
    return factory.instantiate(config, config_path="core_env.demand_generator", raw_piece_size=raw_piece_size)
