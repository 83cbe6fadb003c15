"""Documented path of a wrapper that is defined in `dict_spaces`."""

from maze.core.wrappers.dict_spaces import DictObservationWrapper

__all__ = ["DictObservationWrapper"]
