"""Puts values and objects into composed configurations."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import AnyNode, DictConfig, ListConfig, OmegaConf, open_dict

from maze.api.utils import InvalidSpecificationError
from maze.cli.errors import suggestion
from maze.cli.wrapper_overrides import SECTION, short_name, split_wrapper_path
from maze.core.utils.factory import TARGET_KEY


def is_plain(value: Any) -> bool:
    """Whether the command line could state the value as well: numbers, texts, paths, nothing, and lists of these."""
    if isinstance(value, list | tuple):
        return all(is_plain(entry) for entry in value)
    return value is None or isinstance(value, bool | int | float | str | Path | np.integer | np.floating)


def to_node(value: Any) -> Any:
    """The value as a node of OmegaConf; objects are kept as they are, and neither copied nor converted."""
    if isinstance(value, Mapping) and not isinstance(value, DictConfig):
        node = DictConfig({}, flags={"allow_objects": True})
        for key, entry in value.items():
            _insert(node, key, entry)
        return node
    if isinstance(value, list | tuple):
        items = ListConfig([], flags={"allow_objects": True})
        for index, entry in enumerate(value):
            child = to_node(entry)
            child._set_key(index)
            child._set_parent(items)
            items.__dict__["_content"].append(child)
        return items
    if isinstance(value, DictConfig | ListConfig):
        return copy.deepcopy(value)
    leaf = AnyNode(flags={"allow_objects": True})
    leaf.__dict__["_val"] = _native(value)  # goes past OmegaConf's conversion of dataclasses
    return leaf


def _native(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    return str(value) if isinstance(value, Path) else value


def _insert(node: DictConfig, key: Any, value: Any) -> None:
    child = to_node(value)
    child._set_key(key)
    child._set_parent(node)
    node.__dict__["_content"][key] = child


def place(cfg: DictConfig, path: str, value: Any) -> None:
    """Sets, in place, the value at a path such as `model.policy` or `algorithm.lr`.

    A mapping with `_target_` replaces what is there; one without is merged into it.

    :param cfg: Configuration, mapping or object tree to change.
    :param path: Keys with dots between them; keys may have dots of their own (class paths of wrappers).
    """
    is_new = path.startswith("+")
    _Placement(path.lstrip("+"), value, is_new).into(cfg)


@dataclasses.dataclass(frozen=True)
class _Placement:
    path: str
    value: Any
    is_new: bool

    def into(self, root: DictConfig) -> None:
        self._set(root, self.path.split("."), ())

    def _set(self, node: Any, keys: list[str], before: tuple[str, ...]) -> Any:
        """Sets the value below a node.

        :return: What stands in the place of the node now: a changed copy of an object, or the node itself.
        """
        if isinstance(node, DictConfig):
            self._set_in_mapping(node, keys, before)
            return node
        if isinstance(node, ListConfig):
            self._set_in_list(node, keys, before)
            return node
        return self._set_in_object(node, keys, before)

    def _set_in_mapping(self, node: DictConfig, keys: list[str], before: tuple[str, ...]) -> None:
        known = {str(key): key for key in node}
        if before == (SECTION,):
            keys = split_wrapper_path(keys, known)
        for n_keys in range(len(keys), 0, -1):
            name = ".".join(keys[:n_keys])
            if name not in known:
                continue
            key, rest = known[name], keys[n_keys:]
            child = node._get_node(key)
            if not rest:
                self._replace(node, key, child)
            else:
                found = node[key]  # follows interpolations
                changed = self._set(found, rest, (*before, name))
                if changed is not found:
                    _insert(node, key, changed)
            return
        if not self.is_new:
            names = map(short_name, known) if before == (SECTION,) else known
            raise self._unknown(keys[0], list(names), before)
        if len(keys) == 1:
            _insert(node, keys[0], self.value)
            return
        _insert(node, keys[0], {})
        self._set(node._get_node(keys[0]), keys[1:], (*before, keys[0]))

    def _replace(self, node: DictConfig, key: Any, child: Any) -> None:
        is_merged = isinstance(self.value, Mapping) and TARGET_KEY not in self.value and isinstance(child, DictConfig)
        if not is_merged or child._is_none() or child._is_interpolation() or not len(child):
            _insert(node, key, self.value)
            return
        with open_dict(child):
            for name, entry in self.value.items():
                if name in child and isinstance(entry, Mapping):
                    _Placement(str(name), entry, True).into(child)
                else:
                    _insert(child, name, entry)

    def _set_in_list(self, node: ListConfig, keys: list[str], before: tuple[str, ...]) -> None:
        index = int(keys[0]) if keys[0].isdigit() else len(node)
        if index >= len(node):
            raise self._unknown(keys[0], map(str, range(len(node))), before)
        changed = self.value if len(keys) == 1 else self._set(node[index], keys[1:], (*before, keys[0]))
        child = to_node(changed)
        child._set_key(index)
        child._set_parent(node)
        node.__dict__["_content"][index] = child

    def _set_in_object(self, node: Any, keys: list[str], before: tuple[str, ...]) -> Any:
        name = keys[0]
        if isinstance(node, Mapping):
            if name not in node and not self.is_new:
                raise self._unknown(name, map(str, node), before)
            inner = self.value if len(keys) == 1 else self._set(node[name], keys[1:], (*before, name))
            return {**node, name: inner}
        if dataclasses.is_dataclass(node) and not isinstance(node, type):
            names = [field.name for field in dataclasses.fields(node) if field.init]
            if name not in names:
                raise self._unknown(name, names, before)
            inner = self.value if len(keys) == 1 else self._set(getattr(node, name), keys[1:], (*before, name))
            return dataclasses.replace(node, **{name: inner})
        if hasattr(node, name) and not callable(node):
            inner = self.value if len(keys) == 1 else self._set(getattr(node, name), keys[1:], (*before, name))
            changed = copy.copy(node)
            setattr(changed, name, inner)
            return changed
        where = ".".join(before)
        raise InvalidSpecificationError(
            f"overrides[{self.path!r}]: `{where}` is {_named(node)}, which has no `{name}` that could be overridden. "
            f"Change what you pass as `{where}` instead."
        )

    def _unknown(self, name: str, known: Any, before: tuple[str, ...]) -> InvalidSpecificationError:
        where = f"`{'.'.join(before)}` has" if before else "the configuration has"
        return InvalidSpecificationError(
            f"overrides[{self.path!r}]: {where} no key {name!r}.{suggestion(name, known)} To add a key, write "
            f"{'+' + self.path!r}."
        )


def _named(value: Any) -> str:
    if value is None:
        return "empty"
    if isinstance(value, str | int | float):
        return repr(value)
    return f"a {type(value).__name__}"


def as_wrapper_configs(wrappers: Mapping[Any, Any]) -> Any:
    """Wrappers whose names may be classes; such entries need a list, since keys of configurations are texts."""
    if all(isinstance(name, str) for name in wrappers):
        return wrappers
    return [{TARGET_KEY: name, **(arguments or {})} for name, arguments in wrappers.items()]


def has_objects(cfg: Any) -> bool:
    """Whether a configuration holds anything that YAML cannot state."""
    plain = OmegaConf.to_container(cfg) if OmegaConf.is_config(cfg) else cfg
    if isinstance(plain, dict):
        return any(has_objects(value) for value in plain.values())
    if isinstance(plain, list):
        return any(has_objects(value) for value in plain)
    return not (plain is None or isinstance(plain, bool | int | float | str | bytes | Path))
