"""Documented path of a wrapper that is defined in `dict_spaces`."""

from maze.core.wrappers.dict_spaces import NoDictObservationWrapper

__all__ = ["NoDictObservationWrapper"]
