"""Insertion of values and objects into composed configurations."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import AnyNode, DictConfig, ListConfig, OmegaConf, flag_override

from maze.api.utils import InvalidSpecificationError
from maze.cli.errors import suggestion
from maze.cli.hydra_setup import SECTION, short_name, split_wrapper_path
from maze.core.utils.factory import TARGET_KEY

_FLAGS = {"allow_objects": True, "no_deepcopy_set_nodes": True}
"""Flags of OmegaConf's containers that prevent conversion and copies of objects."""


def is_plain(value: Any) -> bool:
    """Return whether the command line can state the value: numbers, texts, paths, None, and lists of these."""
    if isinstance(value, list | tuple):
        return all(is_plain(entry) for entry in value)
    return value is None or isinstance(value, bool | int | float | str | Path | np.integer | np.floating)


def to_node(value: Any) -> Any:
    """Return the value as a node of OmegaConf; objects are neither copied nor converted."""
    if isinstance(value, DictConfig | ListConfig):
        return copy.deepcopy(value)
    node: Any
    if isinstance(value, Mapping):
        node = DictConfig({}, flags=_FLAGS)
        for key, entry in value.items():
            _insert(node, key, entry)
        return node
    if isinstance(value, list | tuple):
        node = ListConfig([None] * len(value), flags=_FLAGS)
        for index, entry in enumerate(value):
            _insert(node, index, entry)
        return node
    if isinstance(value, np.generic):
        value = value.item()
    return AnyNode(str(value) if isinstance(value, Path) else value, flags={"allow_objects": True})


def _insert(node: DictConfig | ListConfig, key: Any, value: Any) -> None:
    """Set an entry of a container, existing or new."""
    with flag_override(node, ["struct", "readonly", "no_deepcopy_set_nodes"], [False, False, True]):
        node[key] = to_node(value)


def place(cfg: DictConfig, path: str, value: Any) -> None:
    """Set, in place, the value at a path such as `model.policy` or `algorithm.lr`.

    A mapping with `_target_` replaces the present value; one without is merged into it.

    :param cfg: Configuration, mapping or object tree to change.
    :param path: Keys with dots between them; keys may contain dots (class paths of wrappers).
    """
    _Placement(path.lstrip("+"), value, is_new=path.startswith("+")).below(cfg, path.lstrip("+").split("."), ())


@dataclasses.dataclass(frozen=True)
class _Placement:
    path: str
    value: Any
    is_new: bool

    def below(self, node: Any, keys: list[str], before: tuple[str, ...]) -> Any:
        """Set the value below a node.

        :return: The replacement of the node: the value if no keys are left, a changed data class, or the node.
        """
        if not keys:
            return self.value
        if isinstance(node, DictConfig):
            self._set_in_mapping(node, keys, before)
            return node
        name, rest, here = keys[0], keys[1:], (*before, keys[0])
        if isinstance(node, ListConfig):
            if not name.isdigit() or int(name) >= len(node):
                raise self._unknown(name, map(str, range(len(node))), before)
            _insert(node, int(name), self.below(node[int(name)], rest, here))
            return node
        if dataclasses.is_dataclass(node) and not isinstance(node, type):
            names = [field.name for field in dataclasses.fields(node) if field.init]
            if name not in names:
                raise self._unknown(name, names, before)
            return dataclasses.replace(node, **{name: self.below(getattr(node, name), rest, here)})
        where = ".".join(before)
        named = "empty" if node is None else repr(node) if is_plain(node) else f"a {type(node).__name__}"
        raise InvalidSpecificationError(
            f"overrides[{self.path!r}]: `{where}` is {named}, which has no `{name}` that could be overridden. "
            f"Change the object passed as `{where}`, or pass its configuration: a mapping with `{TARGET_KEY}`."
        )

    def _set_in_mapping(self, node: DictConfig, keys: list[str], before: tuple[str, ...]) -> None:
        known = {str(key): key for key in node}
        if before == (SECTION,):
            keys = split_wrapper_path(keys, known)
        for n_keys in range(len(keys), 0, -1):
            name, rest = ".".join(keys[:n_keys]), keys[n_keys:]
            if name not in known:
                continue
            if not rest:
                self._replace(node, known[name])
                return
            found = node[known[name]]  # follows interpolations
            changed = self.below(found, rest, (*before, name))
            if changed is not found:
                _insert(node, known[name], changed)
            return
        if not self.is_new:
            names = map(short_name, known) if before == (SECTION,) else known
            raise self._unknown(keys[0], list(names), before)
        if len(keys) == 1:
            _insert(node, keys[0], self.value)
            return
        _insert(node, keys[0], {})
        self.below(node[keys[0]], keys[1:], (*before, keys[0]))

    def _replace(self, node: DictConfig, key: Any) -> None:
        child = None if OmegaConf.is_interpolation(node, key) or OmegaConf.is_missing(node, key) else node[key]
        is_merged = isinstance(self.value, Mapping) and TARGET_KEY not in self.value and isinstance(child, DictConfig)
        if not is_merged or not child:
            _insert(node, key, self.value)
            return
        for name, entry in self.value.items():
            if name in child and isinstance(entry, Mapping):
                _Placement(str(name), entry, True).below(child, str(name).split("."), ())
            else:
                _insert(child, name, entry)

    def _unknown(self, name: str, known: Any, before: tuple[str, ...]) -> InvalidSpecificationError:
        where = f"`{'.'.join(before)}` has" if before else "the configuration has"
        return InvalidSpecificationError(
            f"overrides[{self.path!r}]: {where} no key {name!r}.{suggestion(name, known)} To add a key, write "
            f"{'+' + self.path!r}."
        )


def as_wrapper_configs(wrappers: Mapping[Any, Any]) -> Any:
    """Return wrappers as a configuration; classes as names need a list, since keys of configurations are texts."""
    if all(isinstance(name, str) for name in wrappers):
        return wrappers
    return [{TARGET_KEY: name, **(arguments or {})} for name, arguments in wrappers.items()]
