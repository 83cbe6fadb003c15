"""Documented path of a wrapper that is defined in `no_dict_spaces_wrapper`."""

from maze.core.wrappers.no_dict_spaces_wrapper import SortedSpacesWrapper

__all__ = ["SortedSpacesWrapper"]
