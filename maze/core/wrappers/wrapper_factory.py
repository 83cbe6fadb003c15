"""Wrappers from configurations."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from maze.core.annotations import override
from maze.core.errors import ConfigError, did_you_mean
from maze.core.utils.factory import TARGET_KEY, CollectionOfConfigType, Factory, plain_container
from maze.core.wrappers.wrapper import Wrapper

T = TypeVar("T")

_BUILT_IN = "maze.core.wrappers"


class WrapperFactory(Factory[Wrapper[Any]]):
    """Build wrappers from dotted paths or, for built-in and imported ones, from class names."""

    def __init__(self) -> None:
        super().__init__(Wrapper)

    @classmethod
    def wrap_from_config(cls, env: T, wrapper_config: CollectionOfConfigType) -> Wrapper[Any] | T:
        """Wrap an environment.

        :param env: The environment.
        :param wrapper_config: Wrappers, the first one innermost: a mapping from name or class to arguments,
            or a list of mappings with `_target_` or of such mappings with one entry.
        """
        factory = cls()
        for name, arguments, config_path in _wrappers(plain_container(wrapper_config, "wrappers")):
            wrapper_type = factory.type_from_name(name, config_path=config_path)
            # By position: the first argument of constructors may have any name.
            config = {TARGET_KEY: wrapper_type, "_args_": [env], **arguments}
            env = factory.instantiate(config, config_path=config_path)  # type: ignore[assignment]
        return env

    @classmethod
    def configured(cls, wrapper_config: CollectionOfConfigType) -> list[tuple[type[Wrapper[Any]], dict[str, Any]]]:
        """Return the classes of configured wrappers with their arguments, innermost first.

        :param wrapper_config: See :meth:`wrap_from_config`.
        """
        factory = cls()
        return [
            (factory.type_from_name(name, config_path=config_path), arguments)
            for name, arguments, config_path in _wrappers(plain_container(wrapper_config, "wrappers"))
        ]

    @override(Factory)
    def type_or_function(self, name: str, config_path: str = "") -> Any:
        if "." not in name:
            return _class_of_short_name(name, config_path)
        return super().type_or_function(name, config_path)


def _wrappers(config: Any) -> Iterator[tuple[Any, dict[str, Any], str]]:
    """Yield name or class, arguments and configuration key of each wrapper."""
    if isinstance(config, Mapping):
        for name, arguments in config.items():
            config_path = f"wrappers.{getattr(name, '__name__', name)}"
            if arguments is not None and not isinstance(arguments, Mapping):
                raise ConfigError(f"{config_path}: expected a mapping of arguments, found {arguments!r}.")
            yield *_split_target(arguments or {}, name), config_path
        return
    if not isinstance(config, Sequence | None) or isinstance(config, str):
        raise ConfigError(f"wrappers: expected a mapping or a list, found {config!r}.")
    for index, entry in enumerate(config or ()):
        if isinstance(entry, Mapping) and TARGET_KEY not in entry:
            yield from _wrappers(entry)
        elif isinstance(entry, Mapping | str | type):
            arguments = entry if isinstance(entry, Mapping) else {}
            yield *_split_target(arguments, entry), f"wrappers[{index}]"
        else:
            raise ConfigError(f"wrappers[{index}]: expected a mapping with `{TARGET_KEY}`, found {entry!r}.")


def _split_target(arguments: Mapping[str, Any], name: Any) -> tuple[Any, dict[str, Any]]:
    others = {key: value for key, value in arguments.items() if key != TARGET_KEY}
    return arguments.get(TARGET_KEY, name), others


def _class_of_short_name(name: str, config_path: str) -> type[Wrapper[Any]]:
    package = importlib.import_module(_BUILT_IN)
    for module in pkgutil.walk_packages(package.__path__, f"{_BUILT_IN}."):
        importlib.import_module(module.name)
    known = {*subclasses_of(Wrapper)}
    named = {klass for klass in known if klass.__name__ == name}
    found = {klass for klass in named if klass.__module__.startswith(f"{_BUILT_IN}.")} or named
    if not found:
        hint = did_you_mean(name, [klass.__name__ for klass in known])
        raise ConfigError(f"{config_path}: there is no built-in or imported wrapper `{name}`.{hint}")
    if len(found) > 1:
        paths = sorted(f"{klass.__module__}.{klass.__qualname__}" for klass in found)
        raise ConfigError(f"{config_path}: `{name}` may be any of {paths}; name one by its dotted path.")
    return found.pop()


def subclasses_of(klass: type) -> Iterator[type[Any]]:
    """Yield the imported subclasses of a class, direct or not."""
    subclasses: list[type[Any]] = klass.__subclasses__()
    for subclass in subclasses:
        yield subclass
        yield from subclasses_of(subclass)
