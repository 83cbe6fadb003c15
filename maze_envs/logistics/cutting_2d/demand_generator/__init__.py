"""What customers order."""

from maze_envs.logistics.cutting_2d.demand_generator.demand_generator import DemandGenerator
from maze_envs.logistics.cutting_2d.demand_generator.factory import build_demand_generator

__all__ = ["DemandGenerator", "build_demand_generator"]
