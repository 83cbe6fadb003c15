"""Demand generators from configurations."""

from __future__ import annotations

from typing import Any

from maze.core.annotations import override
from maze.core.errors import ConfigError, did_you_mean
from maze.core.utils.factory import ConfigType, Factory
from maze_envs.logistics.cutting_2d.demand_generator.demand_generator import DemandGenerator
from maze_envs.logistics.cutting_2d.demand_generator.mixed_periodic import MixedPeriodicDemandGenerator
from maze_envs.logistics.cutting_2d.demand_generator.static import StaticDemandGenerator
from maze_envs.logistics.cutting_2d.demand_generator.uniform import UniformDemandGenerator
from maze_envs.logistics.cutting_2d.env.sizes import Size

SHORT_NAMES = {
    "mixed_periodic": MixedPeriodicDemandGenerator,
    "static": StaticDemandGenerator,
    "uniform": UniformDemandGenerator,
}


class _DemandGeneratorFactory(Factory[DemandGenerator]):
    @override(Factory)
    def type_or_function(self, name: str, config_path: str = "") -> Any:
        if "." in name:
            return super().type_or_function(name, config_path)
        if name not in SHORT_NAMES:
            hint = did_you_mean(name, SHORT_NAMES)
            raise ConfigError(
                f"{config_path}: there is no demand generator `{name}`.{hint} Known: {sorted(SHORT_NAMES)}; name your "
                "own by their dotted path."
            )
        return SHORT_NAMES[name]


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
