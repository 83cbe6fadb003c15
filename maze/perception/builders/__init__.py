"""Architecture templates: from observation spaces and a configuration to networks."""

from maze.perception.builders.base import BaseModelBuilder
from maze.perception.builders.concat import ConcatModelBuilder

__all__ = ["BaseModelBuilder", "ConcatModelBuilder"]
