"""Factory of objects from configurations, and lookup of the classes and functions that these name; dangerous ones are
refused.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import pkgutil
import re
import sys
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar, Union, cast

from maze.core.errors import ConfigError, ConfigImportError, closest, did_you_mean
from maze.core.utils.import_guard import ForeignModuleError

# fmt: off
_FORBIDDEN_MODULES = frozenset({
    "_posixsubprocess", "asyncio", "bdb", "cProfile", "code", "codeop", "cloudpickle", "ctypes", "dill",
    "faulthandler", "gc", "importlib", "inspect", "joblib", "marshal", "mmap", "multiprocessing", "nt", "os", "pdb",
    "pickle", "pip", "pkgutil", "posix", "profile", "pty", "resource", "runpy", "setuptools", "shelve", "shutil",
    "signal", "site", "socket", "subprocess", "sys", "tempfile", "threading", "timeit", "trace", "webbrowser",
})
_FORBIDDEN_PATHS = (
    "builtins.__import__", "builtins.breakpoint", "builtins.compile", "builtins.delattr", "builtins.eval",
    "builtins.exec", "builtins.exit", "builtins.getattr", "builtins.globals", "builtins.input", "builtins.locals",
    "builtins.open", "builtins.quit", "builtins.setattr", "builtins.vars", "hydra.utils.call",
    "hydra.utils.instantiate", "io.open", "numpy.load", "numpy.f2py", "pandas.eval", "pandas.read_pickle",
    "torch.hub", "torch.load", "torch.package", "torch.utils.cpp_extension",
)
# fmt: on
_FILE_SUFFIXES = frozenset({"csv", "jpg", "json", "npy", "npz", "pkl", "png", "pt", "tsv", "txt", "yaml", "yml", "zip"})


def is_file_name(path: str) -> bool:
    """Return whether a text that may be a dotted path is a file name, which is never looked up."""
    return path.rpartition(".")[2] in _FILE_SUFFIXES


def is_module_name(name: str) -> bool:
    """Return whether a text can be imported: identifiers separated by dots."""
    return all(part.isidentifier() for part in name.split("."))


def named_module(name: str, where: str) -> ModuleType:
    """Import a module that a configuration names.

    :param name: Dotted name.
    :param where: Key of the configuration, for messages.
    :raises ConfigError: It is not the name of a module, or cannot be imported.
    """
    if not is_module_name(name):
        raise ConfigError(f"{_prefix(where)}`{name}` is not the name of a module.")
    try:
        return importlib.import_module(name)
    except ForeignModuleError:
        raise
    except ImportError as error:
        raise ConfigImportError(f"{_prefix(where)}module `{name}` cannot be imported: {error}") from error


def locate(path: str, where: str = "") -> Any:
    """Return the object at a dotted path, such as `package.module.Class`.

    :param path: Module path and name(s) in it.
    :param where: Key of the configuration, for messages.
    :raises ConfigError: There is no such object, or configurations may not name it.
    """
    refuse_forbidden_path(path, where)
    parts = path.split(".")
    if len(parts) < 2 or not is_module_name(path):
        raise ConfigError(f"{_prefix(where)}`{path}` is not a dotted path to a class or function.")
    module, depth = _import_deepest_module(parts, path, where)
    found: Any = module
    for index, name in enumerate(parts[depth:], depth):
        if not hasattr(found, name):
            parent, members = ".".join(parts[:index]), [each for each in dir(found) if not each.startswith("_")]
            if isinstance(found, ModuleType) and hasattr(found, "__path__"):
                members += [each.name for each in pkgutil.iter_modules(found.__path__)]
            hint = did_you_mean(name, members, f"{parent}.{{}}")
            raise ConfigImportError(f"{_prefix(where)}`{path}` does not exist: `{parent}` has no `{name}`.{hint}")
        found = getattr(found, name)
    if isinstance(found, ModuleType):
        raise ConfigError(f"{_prefix(where)}`{path}` is a module; name a class or function in it.")
    own_name = getattr(found, "__qualname__", getattr(found, "__name__", ""))
    if isinstance(own_module := getattr(found, "__module__", None), str):  # found under any path
        refuse_forbidden_path(f"{own_module}.{own_name}", f"{_prefix(where)}`{path}`")
    return found


def path_of(named: Any) -> str:
    """Return the dotted path of a class or function, valid in other processes.

    Definitions of a script are named by its file, since every process has another `__main__`.
    """
    module = getattr(named, "__module__", None) or "builtins"
    if module == "__main__":
        main = sys.modules["__main__"]
        spec, stem = getattr(main, "__spec__", None), Path(getattr(main, "__file__", "") or "").stem
        if spec is not None:  # python -m
            module = str(spec.name)
        elif stem.isidentifier():  # a notebook or a console has none
            module = stem
    return f"{module}.{getattr(named, '__qualname__', type(named).__name__)}"


def refuse_forbidden_path(path: str, where: str = "") -> None:
    """Refuse targets that execute commands or code, or access files, by their path.

    :param path: Import path of the target.
    :param where: Configuration key, for messages.
    :raises ConfigError: The path is one of them.
    """
    if is_file_name(path):
        raise ConfigError(f"{_prefix(where)}`{path}` is the name of a file, not of a class or function.")
    is_module_forbidden = path.split(".", maxsplit=1)[0] in _FORBIDDEN_MODULES
    if is_module_forbidden or any(path == p or path.startswith(f"{p}.") for p in _FORBIDDEN_PATHS):
        raise ConfigError(f"{_prefix(where)}`{path}` is refused: configurations may not name it.")


def _import_deepest_module(parts: list[str], path: str, where: str) -> tuple[ModuleType, int]:
    for depth in range(len(parts), 0, -1):
        name = ".".join(parts[:depth])
        try:
            return importlib.import_module(name), depth
        except ForeignModuleError:
            raise
        except ModuleNotFoundError as error:
            # either this is not a module, or the module exists and one of its imports does not
            if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
                needed = f"it needs the package `{error.name}`"
                raise ConfigImportError(f"{_prefix(where)}`{path}`: importing `{name}` failed, {needed}.") from error
        except ImportError as error:
            raise ConfigImportError(f"{_prefix(where)}`{path}`: importing `{name}` failed: {error}") from error
    top_levels = [module.name for module in pkgutil.iter_modules()]
    hint = did_you_mean(parts[0], top_levels, ".".join(["{}", *parts[1:]]))
    raise ConfigImportError(f"{_prefix(where)}there is no package `{parts[0]}` to find `{path}` in.{hint}")


def _prefix(where: str) -> str:
    return f"{where}: " if where else ""


BaseType = TypeVar("BaseType")

ConfigType = Union[Mapping[str, Any], Any, None]
"""An object, or a mapping with `_target_` (dotted path of a class or function) and its arguments, or None."""

CollectionOfConfigType = Union[list[ConfigType], Mapping[Union[str, type], ConfigType]]
"""Several configurations or objects, as a list or by name."""

TARGET_KEY = "_target_"
_IGNORED_KEYS = ("_recursive_", "_convert_")  # only for Hydra's instantiation


class Factory(Generic[BaseType]):
    """Factory of objects of one type.

    >>> Factory(dict).instantiate({"_target_": "builtins.dict", "a": 1})
    {'a': 1}

    :param base_type: Required type of the objects, checked before any call.
    """

    def __init__(self, base_type: type[BaseType]) -> None:
        self.base_type = base_type

    def instantiate(self, config: BaseType | ConfigType, *, config_path: str = "", **kwargs: Any) -> BaseType:
        """Build an object from a configuration, or check a given object.

        Arguments that are mappings with `_target_` are built, too, unless their annotation is a type of configurations
        (`ConfigType`, `Mapping`, `dict`).

        :param config: Mapping with `_target_` and arguments, or the object itself.
        :param config_path: Key of the configuration, for messages.
        :param kwargs: Further arguments; those of the configuration have priority.
        :raises ConfigError: The value describes no object of the type, or its arguments do not fit.
        """
        config = plain_container(config, config_path)
        if isinstance(config, Mapping) and TARGET_KEY in config:
            return self._build(config, config_path, kwargs)
        if self._accepts(config):
            return cast(BaseType, config)
        found = f"a mapping with the keys {list(config)}" if isinstance(config, Mapping) else repr(config)
        expected = f"expected a {self._type_name} or a mapping with `{TARGET_KEY}`"
        raise ConfigError(f"{_prefix(config_path)}{expected}, found {found}.")

    def instantiate_collection(
        self, config: CollectionOfConfigType, *, config_path: str = "", **kwargs: Any
    ) -> dict[str | int, BaseType]:
        """Build several objects.

        :param config: Configurations or objects, as a list or by name. A name may also be a class, with the arguments
            as its value.
        :param config_path: Key of the configuration, for messages.
        :param kwargs: Further arguments of each.
        :return: The objects by name, or by index where a list is given.
        """
        built: dict[str | int, BaseType] = {}
        for key, entry in _items(config, config_path):
            name = key.__name__ if isinstance(key, type) else key
            entry_config = {TARGET_KEY: key, **(entry or {})} if isinstance(key, type) else entry
            built[name] = self.instantiate(entry_config, config_path=_join(config_path, name), **kwargs)
        return built

    def type_from_name(self, name: str | type[BaseType], *, config_path: str = "") -> type[BaseType]:
        """Return the class with a name.

        :param name: Dotted path, or a class, which is only checked.
        :param config_path: Key of the configuration, for messages.
        :raises ConfigError: There is none, or it is not a class.
        """
        found = self.type_or_function(name, config_path) if isinstance(name, str) else name
        if not isinstance(found, type):
            raise ConfigError(f"{_prefix(config_path)}`{name}` is not a class.")
        self._check_class(found, str(name), config_path)
        return found

    @property
    def _type_name(self) -> str:
        return getattr(self.base_type, "__name__", str(self.base_type))

    def _accepts(self, value: Any) -> bool:
        try:
            return isinstance(value, self.base_type)
        except TypeError:  # a typing construct, which cannot be checked
            return value is not None

    def _check_class(self, found: type, name: str, config_path: str) -> None:
        is_checkable: Any = isinstance(self.base_type, type)  # it may be a typing construct
        if is_checkable and not issubclass(found, self.base_type):
            raise ConfigError(f"{_prefix(config_path)}`{name}` is not a subclass of {self._type_name}.")

    def _build(self, config: Mapping[str, Any], config_path: str, kwargs: dict[str, Any]) -> BaseType:
        arguments = {key: value for key, value in config.items() if key not in _IGNORED_KEYS}
        target = arguments.pop(TARGET_KEY)
        positional = arguments.pop("_args_", ())
        is_partial = arguments.pop("_partial_", False)
        found = self.type_or_function(target, config_path) if isinstance(target, str) else target
        if not callable(found):
            raise ConfigError(f"{_prefix(config_path)}`{TARGET_KEY}` must name a class or function, found {target!r}.")
        function = cast(Callable[..., Any], found)
        # a wrapper overrides `__class__`: then only the built object can be checked
        is_plain = isinstance(function, type) and not any("__class__" in vars(base) for base in function.__mro__[:-1])
        if is_plain and not is_partial:
            self._check_class(cast(type, function), str(target), config_path)

        arguments = {
            k: _built(v, takes_configuration(function, k), _join(config_path, k)) for k, v in arguments.items()
        }
        positional = [_built(v, False, f"{config_path}[{i}]") for i, v in enumerate(positional)]
        arguments = {**{k: v for k, v in kwargs.items() if k not in arguments}, **arguments}
        if is_partial:
            return cast(BaseType, functools.partial(function, *positional, **arguments))
        _check_arguments(function, positional, arguments, config_path)
        try:
            built = function(*positional, **arguments)
        except TypeError as error:  # `function` may pass its arguments on to one that does not take them
            refused = [name for name in arguments if f"got an unexpected keyword argument '{name}'" in str(error)]
            if not refused:
                raise
            raise ConfigError(f"{_prefix(config_path)}unknown argument `{refused[0]}`: {error}.") from error
        if not self._accepts(built):
            made = f"`{target}` returned a {type(built).__name__}"
            raise ConfigError(f"{_prefix(config_path)}expected a {self._type_name}, but {made}.")
        return cast(BaseType, built)

    def type_or_function(self, name: str, config_path: str = "") -> Any:
        """Return the target of a name; factories with short names override this.

        :param name: Import path.
        :param config_path: Configuration key, for messages.
        :raises ConfigError: The target does not exist, or is refused.
        """
        return locate(name, config_path)


def plain_container(config: Any, config_path: str = "") -> Any:
    """Convert a configuration of OmegaConf to dictionaries and lists with resolved interpolations.

    Other values are returned unchanged.

    :param config: The configuration.
    :param config_path: Its key, for messages.
    :raises ConfigError: A value is missing, or an interpolation cannot be resolved.
    """
    if not type(config).__module__.startswith("omegaconf."):
        return config
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        return OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{_prefix(config_path)}the configuration is incomplete: {error}") from error


def _built(value: Any, takes_configuration: bool, config_path: str) -> Any:
    """Build nested configurations of an argument, unless its parameter takes the configuration."""
    value = plain_container(value, config_path)
    if takes_configuration:
        return value
    if isinstance(value, Mapping):
        if TARGET_KEY in value:
            return Factory(object).instantiate(value, config_path=config_path)
        return {key: _built(entry, False, _join(config_path, key)) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_built(entry, False, f"{config_path}[{i}]") for i, entry in enumerate(value))
    return value


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature; a constructor that collects `rest` also takes the arguments of its base class by name."""
    signature = inspect.signature(function)
    if not isinstance(function, type) or "rest" not in signature.parameters:
        return signature
    own = [parameter for name, parameter in signature.parameters.items() if name != "rest"]
    inherited = [p for p in _signature(function.__mro__[1]).parameters.values() if p.name not in signature.parameters]
    optional = [
        p.replace(kind=p.KEYWORD_ONLY, default=None if p.default is p.empty else p.default)
        for p in inherited
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    return signature.replace(parameters=[*own, *optional])


def _check_arguments(
    function: Callable[..., Any], positional: Sequence[Any], arguments: dict[str, Any], config_path: str
) -> None:
    """Name all missing and unknown arguments with their key."""
    try:
        signature = _signature(function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*positional, **arguments)
        return
    except TypeError as error:
        cause = error
    parameters = signature.parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    names = [p.name for p in named]
    faults = []
    missing = [p.name for p in named[len(positional) :] if p.default is p.empty and p.name not in arguments]
    if missing:
        faults.append(f"missing argument(s) {', '.join(f'`{name}`' for name in missing)}")
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        for name in (name for name in arguments if name not in names):
            close = closest(name, names)
            faults.append(f"unknown argument `{name}`" + (f" (did you mean `{close}`?)" if close else ""))
    what, called = "; ".join(faults) or str(cause), getattr(function, "__qualname__", repr(function))
    raise ConfigError(f"{_prefix(config_path)}{what}. Signature: {called}{signature}") from cause


def _items(config: Any, config_path: str) -> list[tuple[Any, Any]]:
    config = plain_container(config, config_path)
    if config is None:
        return []
    if isinstance(config, Mapping):
        return list(config.items())
    if isinstance(config, Sequence) and not isinstance(config, str):
        return list(enumerate(config))
    raise ConfigError(f"{_prefix(config_path)}expected a list or a mapping of configurations, found {config!r}.")


def _join(config_path: str, key: Any) -> str:
    return f"{config_path}.{key}" if config_path else str(key)


# Types of configurations in an annotation; a dictionary of objects needs them built.
_CONFIGURATION = re.compile(
    r"(?<![\w.])(typing\.|collections\.abc\.|omegaconf\.(\w+\.)?)?"
    r"(ConfigType|CollectionOfConfigType|DictConfig|ListConfig"
    r"|(dict|Dict|Mapping|MutableMapping)((?!\[)|\[[^\[\]]*\bAny\]))(?!\w)"
)


def takes_configuration(function: Callable[..., Any], name: str) -> bool:
    """Return whether the annotation of a parameter is a type of configurations.

    Types are recognised by their names, because modules often import them for type checking only.

    :param function: The function or class.
    :param name: The parameter.
    """
    # a constructor may pass arguments on to that of its base class
    called = [vars(base).get("__init__") for base in function.__mro__] if isinstance(function, type) else [function]
    annotations = ChainMap(*(getattr(each, "__annotations__", {}) for each in called))
    annotation = annotations.get(name, annotations.get("kwargs"))
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return _CONFIGURATION.search(text.partition("Callable[")[0]) is not None
