"""Stored configurations of earlier runs, which may come from untrusted sources, and the packages that the user trusts.

Building a configuration imports and calls the names in it. Only classes of known kinds are built from a stored one.
Each text is checked by its effect: Maze imports modules for `_target_`, for entries of `import`, for texts
`package.module.Name` and for texts `module:name`, and only if their parts are identifiers
(:mod:`maze.core.utils.factory`). Other texts import nothing.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from functools import cache, cached_property
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

import yaml

try:
    from yaml import CSafeLoader as SafeLoader
except ImportError:  # PyYAML without libyaml
    from yaml import SafeLoader  # type: ignore[assignment]

from maze.core.errors import CheckpointError
from maze.core.utils.factory import TARGET_KEY, is_file_name, is_module_name
from maze.core.utils.files import read_json_object, write_whole
from maze.core.utils.import_guard import NEVER_WHOLE, current_guard, trust_hint

# fmt: off
# Known kinds: these classes and their subclasses.
_KINDS = frozenset({
    "gymnasium.core.Wrapper",
    "gymnasium.spaces.space.Space",
    "maze.core.agent.flat_policy.FlatPolicy",
    "maze.core.agent.policy.Policy",
    "maze.core.env.action_conversion.ActionConversionInterface",
    "maze.core.env.base_env.BaseEnv",
    "maze.core.env.observation_conversion.ObservationConversionInterface",
    "maze.core.env.reward.RewardAggregatorInterface",
    "maze.core.log_events.kpi_calculator.KpiCalculator",
    "maze.core.wrappers.observation_normalization.normalization_strategies.base.ObservationNormalizationStrategy",
    "maze.core.wrappers.observation_preprocessing.preprocessors.base.PreProcessor",
    "maze.core.wrappers.wrapper.Wrapper",
    "maze.distributions.distribution.ProbabilityDistribution",
    "maze.distributions.distribution_mapper.DistributionMapper",
    "maze.perception.builders.base.BaseModelBuilder",
    "maze.perception.models.critics.critic_composer_interface.CriticComposerInterface",
    "maze.perception.models.model_composer.BaseModelComposer",
    "maze.perception.models.policies.base_policy_composer.BasePolicyComposer",
    "maze.train.trainers.common.evaluators.evaluator.Evaluator",
    "maze.train.trainers.es.optimizers.base_optimizer.Optimizer",
    "maze_envs.logistics.cutting_2d.demand_generator.DemandGenerator",
    "torch.nn.modules.module.Module",
    "torch.optim.optimizer.Optimizer",
})

# Known functions that make environments.
_FUNCTIONS = frozenset({
    "maze.interop.pettingzoo_env.make_pettingzoo_env",
    "maze.core.wrappers.maze_gym_env_wrapper.make_gym_maze_env",
    "maze_envs.logistics.dispatching.maze_env.dispatching_env",
    "maze_envs.logistics.dispatching.maze_env.flat_dispatching_env",
    "maze_envs.robotics.pick_and_place.maze_env.flat_pick_and_place_env",
    "maze_envs.robotics.pick_and_place.maze_env.pick_and_place_env",
})
# fmt: on

_LIBRARIES = ("gymnasium", "maze", "maze_envs", "torch")
# Packages that configurations may import, because they register environments.
_REGISTERS_ENVIRONMENTS = frozenset({"ale_py"})
_TORCH_MODULES = ("torch.nn.modules.", "torch.optim.")

_SPACE = re.compile(r"(gym|gymnasium)\.spaces\.\w+")
_INTERPOLATION = re.compile(r"\$\{([^}]*)")
_WHOLE_INTERPOLATION = re.compile(r"\$\{\s*([^}]*?)\s*\}")
_IMPORTS = "import"  # key of an environment's configuration with modules to import
_SPACES = "action_space"  # key of the class of a space, which is always one of gymnasium
_WRITES_FILES = "RecordVideo"
_RESOLVERS = ("now", "oc.dict.keys", "oc.dict.values", "oc.env", "oc.select")

MOST_BYTES = 1 << 20
_MOST_VALUES, _DEEPEST = 50_000, 50
# Largest number of characters of resolved interpolations, and largest depth of references.
_LONGEST_RESOLVED, _LONGEST_CHAIN = 1 << 22, 50
_COST_OF_REFERENCE = 10  # number of values that an interpolation counts for
_MOST_NAMED = 1_000  # largest number of different packages that texts may name
_MOST_DIGITS = 4_000

_Key: TypeAlias = tuple[Any, ...]
_NOTHING: Any = object()


class StoredText(NamedTuple):
    """A key, or a value that is not a container.

    :param key: Its position.
    :param use: The key that determines its use: `_target_`, `import`, `action_space`; empty: an argument.
    """

    key: str
    value: Any
    use: str = ""


def refuse_foreign_targets(
    config: Any, path: Path, trusted_packages: Sequence[str] = (), way_out: str = "", section: str = ""
) -> None:
    """Raise a `CheckpointError` if a stored configuration names code that is neither known nor trusted.

    Allowed at any depth are classes of known kinds (environments, wrappers, policies, networks, their parts) of Maze
    and torch, the functions that make Maze's environments, and all definitions of trusted packages.

    :param config: The configuration as plain containers, with resolved interpolations.
    :param path: Its file.
    :param trusted_packages: Packages of the user. Maze, torch, the standard library and some others are never trusted
        as a whole.
    :param way_out: Alternative to trusting the code, for messages.
    :param section: Key of the configuration in the file.
    """
    trusted = tuple(package for package in trusted_packages if package not in NEVER_WHOLE)
    looked_for: set[str] = set()

    @cache
    def can_be_imported(package: str) -> bool:
        looked_for.add(package)
        if len(looked_for) > _MOST_NAMED:
            raise CheckpointError(f"{path} names more than {_MOST_NAMED} different packages.")
        is_in_working_directory = PathFinder.find_spec(package, [""]) is not None
        return is_importable(package) or is_in_working_directory

    for text in texts_of(config, section):
        reason = _objection(text, trusted, can_be_imported)
        if isinstance(text.value, str) and text.value.rpartition(".")[2] == _WRITES_FILES:
            reason = "writes files to any directory"
        if reason:
            hint = trust_hint(re.split("[.:]", str(text.value))[0])
            raise CheckpointError(
                f"{path}: `{text.key}` names {text.value}, which {reason}. Stored configurations may name classes of "
                "known kinds (environments, wrappers, policies, networks and their parts) of Maze and torch, and "
                f"trusted packages.{hint}{way_out and f' Otherwise {way_out}.'}"
            )


def read_yaml(path: Path) -> Any:
    """Read a YAML file of bounded size as plain containers, as OmegaConf does, with libyaml if installed.

    :param path: The file.
    :raises CheckpointError: It cannot be read, is too large or too deep, or has aliases, by which a few lines can
        expand to more than fits into memory.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise CheckpointError(f"{path} cannot be read: it is larger than {MOST_BYTES} bytes.")
        n_values = depth = 0
        for event in yaml.parse(content, _Loader):
            if isinstance(event, yaml.AliasEvent):
                raise CheckpointError(f"{path} holds YAML aliases, which stored configurations must not have.")
            n_values += isinstance(event, yaml.NodeEvent)
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if n_values > _MOST_VALUES or depth > _DEEPEST:
                raise CheckpointError(f"{path} holds more than {_MOST_VALUES} values, or is nested too deeply.")
        return yaml.load(content, _Loader)
    except (yaml.YAMLError, ValueError, TypeError, OSError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{path} cannot be read as YAML ({type(error).__name__}: {reason:.300}).") from error


class _Loader(SafeLoader):
    """Loader of OmegaConf's format: floats without a point, texts that look like dates, paths."""


def _refused_kind(loader: Any, node: yaml.Node) -> Any:
    raise ValueError(f"{node.tag} is not a value of a configuration")


def _short_int(loader: Any, node: yaml.ScalarNode) -> Any:
    """Read an integer; the time grows with the square of its number of digits."""
    if len(node.value) > _MOST_DIGITS:
        raise ValueError(f"a number of {len(node.value)} digits")
    return loader.construct_yaml_int(node)


_FLOAT = r"[-+]?(\d[\d_]*\.[\d_]*|\.\d[\d_]*|\d[\d_]*(?=[eE]))([eE][-+]?\d+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(f"^(?:{_FLOAT})$"), list("-+0123456789."))
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
    for first, resolvers in _Loader.yaml_implicit_resolvers.items()
}
_Loader.add_constructor("tag:yaml.org,2002:int", _short_int)
for _kind in ("binary", "omap", "pairs", "set", "timestamp"):  # no values of configurations
    _Loader.add_constructor(f"tag:yaml.org,2002:{_kind}", _refused_kind)
_Loader.add_multi_constructor(
    "tag:yaml.org,2002:python/object/apply:pathlib.",
    lambda loader, kind, node: Path(*map(str, loader.construct_sequence(node))),
)


def read_stored_config(path: Path, way_out: str = "") -> StoredConfig:
    """Read the configuration of a run, without resolving its interpolations.

    :param path: The file.
    :param way_out: Alternative for messages.
    :raises CheckpointError: It is not a configuration, or has interpolations with other functions.
    """
    try:
        plain = read_yaml(path)
    except CheckpointError as error:
        raise CheckpointError(f"{error} {way_out}".strip()) from error
    if not isinstance(plain, dict):
        raise CheckpointError(f"{path} cannot be read as the configuration of a run: it holds no mapping.")
    for text in texts_of(plain):
        for match in _INTERPOLATION.finditer(text.value if isinstance(text.value, str) else ""):
            resolver, colon, _ = match[1].partition(":")
            if "$" in match[1] or (colon and resolver.strip() not in _RESOLVERS):
                allowed = f"may only refer to other values, by {', '.join(_RESOLVERS)}"
                raise CheckpointError(f"{path} holds `{text.value[:200]}`, but its interpolations {allowed}.")
    return StoredConfig(plain, path)


class StoredConfig:
    """A configuration with bounded resolution of interpolations.

    :param plain: Plain containers.
    :param path: The file, for messages.
    """

    def __init__(self, plain: dict[Any, Any], path: Path) -> None:
        self.plain, self.path = plain, path
        self._n_left = self._length_left = 0  # values and characters
        self._open: set[_Key] = set()

    def value(self, key: str = "") -> Any:
        """Return a part of the configuration with resolved interpolations; `None`: there is none.

        :param key: Names separated by dots; empty: the whole configuration.
        :raises CheckpointError: It refers to a missing value, to itself, or exceeds the bounds.
        """
        self._n_left, self._length_left, self._open = _MOST_VALUES, _LONGEST_RESOLVED, set()
        try:
            return self._select(key.split(".") if key else [], default=None)
        except (yaml.YAMLError, ValueError) as error:  # in a default or a format of an interpolation
            raise CheckpointError(f"{self.path}: {key} cannot be resolved ({error}).") from error

    def _select(self, names: Sequence[Any], default: Any = _NOTHING) -> Any:
        """Return the resolved value at a path of names."""
        node: Any = self.plain
        key: _Key = ()
        for name in names:
            if isinstance(node, str) and "${" in node:
                node = self._resolved(node, key)
            entries = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
            found = next(((each, value) for each, value in entries if str(each) == str(name)), None)
            if found is None:
                if default is not _NOTHING:
                    return default
                raise self._error(".".join(map(str, names)), "does not exist, and another value refers to it")
            node, key = found[1], (*key, found[0])
        return self._resolved(node, key)

    def _resolved(self, node: Any, key: _Key) -> Any:
        self._n_left -= 1
        self._length_left -= len(node) if isinstance(node, str) else 0
        if self._n_left < 0 or self._length_left < 0:
            raise self._error(key, f"expands to more than {_MOST_VALUES} values or {_LONGEST_RESOLVED} characters")
        if isinstance(node, dict):
            return {name: self._resolved(value, (*key, name)) for name, value in node.items()}
        if isinstance(node, list):
            return [self._resolved(value, (*key, index)) for index, value in enumerate(node)]
        if not isinstance(node, str) or "${" not in node:
            return node
        if key in self._open or len(self._open) >= _LONGEST_CHAIN:
            raise self._error(key, "refers to itself, or through too many other values")
        self._open.add(key)
        parts = _WHOLE_INTERPOLATION.split(node)
        values = [self._referred(part, key) if index % 2 else part for index, part in enumerate(parts)]
        self._open.discard(key)
        if len(values) == 3 and values[0] == values[2] == "":
            return values[1]
        text = "".join(str(value) for value in values)
        self._length_left -= len(text)
        if "${" in text or any(isinstance(value, (dict, list)) for value in values):
            raise self._error(key, f"holds `{node[:200]}`, which is not a text")
        return text

    def _referred(self, interpolation: str, key: _Key) -> Any:
        resolver, colon, argument = interpolation.partition(":")
        reference, comma, default = (argument if colon else interpolation).partition(",")
        reference = reference.strip(" '\"")
        self._n_left -= _COST_OF_REFERENCE
        if resolver == "now":
            return datetime.now().strftime(argument)
        if resolver == "oc.env":
            found = os.environ.get(reference, default.strip(" '\"") if comma else None)
            if found is None and default.strip() != "null":
                raise self._error(key, f"needs the environment variable {reference}")
            return found
        n_up = len(reference) - len(reference.lstrip("."))
        names = [*(key[:-n_up] if n_up else ()), *re.findall(r"[^.\[\]'\"]+", reference)]
        if resolver == "oc.select":
            return self._select(names, yaml.load(default, _Loader) if comma else None)
        value = self._select(names)
        if colon and isinstance(value, dict):
            return list(value if resolver == "oc.dict.keys" else value.values())
        return value

    def _error(self, key: _Key | str, what: str) -> CheckpointError:
        name = key if isinstance(key, str) else ".".join(map(str, key))
        return CheckpointError(f"{self.path}: {name[:200] or 'it'} {what}.")


def texts_of(node: Any, key: str = "", use: str = "") -> Iterator[StoredText]:
    """Yield all keys and values of a configuration, at any depth.

    :param node: The configuration, in plain containers.
    :param key: Its key.
    :param use: The key that determines their use, see :class:`StoredText`.
    """
    if isinstance(node, dict):
        for name, value in node.items():
            inner = f"{key}.{name}" if key else str(name)
            if name in (TARGET_KEY, _IMPORTS, _SPACES):
                yield from texts_of(value, inner, name) if name != TARGET_KEY else (StoredText(inner, value, name),)
            else:
                yield StoredText(key or inner, name, _IMPORTS if use == _IMPORTS else "")
                yield from texts_of(value, inner, use if use == _IMPORTS else "")
    elif isinstance(node, (list, tuple)):
        for index, value in enumerate(node):
            yield from texts_of(value, f"{key}[{index}]", use)
    else:
        yield StoredText(key, node, use)


def _objection(text: StoredText, trusted: tuple[str, ...], can_be_imported: Callable[[str], bool]) -> str:
    """Return why a text must not reach the code that builds the configuration; empty: it may."""
    value = text.value
    if not isinstance(value, str):
        return "is not a name" if text.use == TARGET_KEY or (text.use == _IMPORTS and value is not None) else ""
    if "${" in value:
        return "would be resolved after this check"
    if text.use == _IMPORTS:
        return _objection_to_module(value, trusted)
    module, colon, _ = value.partition(":")
    if text.use == TARGET_KEY:
        # short names of wrappers are looked up among Maze's and imported ones
        return "" if value.isidentifier() else _objection_to_path(value, True, trusted, can_be_imported)
    if colon and is_module_name(module):  # gymnasium and PettingZoo import the module before the colon
        return _objection_to_module(module, trusted) if can_be_imported(module.partition(".")[0]) else ""
    is_harmless = "." not in value or is_file_name(value) or (text.use == _SPACES and _SPACE.fullmatch(value))
    return "" if is_harmless else _objection_to_path(value, False, trusted, can_be_imported)


def _objection_to_module(module: str, trusted: tuple[str, ...]) -> str:
    is_known = is_module_name(module) and module.partition(".")[0] in (*trusted, *_REGISTERS_ENVIRONMENTS)
    return "" if is_known else "imports a module"


def _objection_to_path(
    path: str, is_target: bool, trusted: tuple[str, ...], can_be_imported: Callable[[str], bool]
) -> str:
    if not is_module_name(path):  # nothing is imported by such a name
        return "is not a dotted path to a class" if is_target else ""
    package = path.partition(".")[0]
    if package not in (*_LIBRARIES, *trusted):
        return "belongs neither to Maze nor to a trusted package" if is_target or can_be_imported(package) else ""
    found = _find(path)
    if found is None:
        return "does not exist there" if is_target else ""
    return _objection_to(found, path, trusted)


def _objection_to(found: Any, path: str, trusted: tuple[str, ...]) -> str:
    if isinstance(found, ModuleType) or not callable(found):
        return "is not a class"
    own_path = _own_path(found)
    package = own_path.partition(".")[0]
    if package != path.partition(".")[0]:
        return f"is {own_path}, which another module imports"
    if package in trusted or own_path in _FUNCTIONS:
        return ""
    if not isinstance(found, type):
        return "is a function, which stored configurations may not call"
    if package == "torch" and not own_path.startswith(_TORCH_MODULES):
        return "is not a network, a part of one or an optimizer"
    return "" if any(_own_path(base) in _KINDS for base in found.__mro__) else "is not of a known kind"


def _find(path: str) -> Any:
    """Return the object at a path, if it is a name of a module; None: there is none. Imports only modules of Maze."""
    parts = path.split(".")
    for depth in range(len(parts) - 1, 0, -1):
        module = _module(".".join(parts[:depth]))
        if module is not None:
            if len(parts) == depth + 1:
                return vars(module).get(parts[depth])
            return sys  # a name within another one: never a class of its own
    return None


def _module(name: str) -> ModuleType | None:
    found = sys.modules.get(name)
    is_of_user = name.partition(".")[0] not in _LIBRARIES
    if found is None and (is_of_user or name.startswith(("maze.", "maze_envs."))) and not name.endswith("__main__"):
        try:
            return importlib.import_module(name)
        except ImportError:
            return None
    return found


def _own_path(found: Any) -> str:
    return f"{getattr(found, '__module__', '')}.{getattr(found, '__qualname__', '')}"


def is_own_package(package: str) -> bool:
    """Return whether a package is user code, not an installed library or a checkout of Maze, by its location.

    :param package: Name without dots; the package is not imported.
    """
    if package in NEVER_WHOLE:
        return False
    spec = _spec_of(package)
    places = [] if spec is None else [spec.origin, *(spec.submodule_search_locations or ())]
    known = [place for place in places if place is not None]
    return bool(known) and not any({"site-packages", "dist-packages"} & set(Path(place).parts) for place in known)


def own_packages(config: Any) -> set[str]:
    """Return the user's packages that the names of code in a configuration belong to.

    :param config: The configuration in plain containers.
    """
    named = {_package_named_by(text) for text in texts_of(config) if isinstance(text.value, str)}
    return {package for package in named if package and is_own_package(package)}


def _package_named_by(text: StoredText) -> str:
    """Return the package of the code that a text may name; empty: it names none."""
    module, colon, _ = text.value.partition(":")
    is_name = text.use in (TARGET_KEY, _IMPORTS) or colon or ("." in module and not is_file_name(module))
    return str(module.partition(".")[0]) if is_name and is_module_name(module) else ""


def is_importable(package: str) -> bool:
    """Return whether there is a package or module of this name; only its parents are imported."""
    return package in sys.modules or _spec_of(package) is not None


def _spec_of(package: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None


# -- runs -------------------------------------------------------------------------------------------------------------

STORED_CONFIG = Path(".hydra") / "config.yaml"
_CHOICES = Path(".hydra") / "hydra.yaml"
SPACES_FILE = "spaces_config.pkl"


class DeployedParts(NamedTuple):
    """Configurations of a run's parts; file names in them are relative to the run directory."""

    env: Any
    wrappers: Any
    policy: Any


class StoredRun:
    """Reader of the configuration of a run, which builds nothing.

    The results of :meth:`sections` may be built in the context
    :func:`~maze.core.utils.import_guard.imports_guarded`.

    :param directory: The run directory.
    :param trusted_packages: Packages whose classes and functions the configuration may name, in addition to those that
        are trusted in the working directory.
    """

    def __init__(self, directory: str | Path, trusted_packages: Sequence[str] = ()) -> None:
        self.directory = Path(directory)
        self.path = self.directory / STORED_CONFIG
        self.trusted_packages = (*trusted_packages, *trusted_here())

    @cached_property
    def config(self) -> StoredConfig:
        """The whole configuration.

        :raises CheckpointError: It cannot be read.
        """
        return read_stored_config(self.path, "Name the model the policy was trained with: model=<option>.")

    def sections(self, names: Sequence[str], refer: str = "{0}=<option>") -> dict[str, Any]:
        """Return checked parts of the configuration as plain containers, which may be built.

        :param names: Their keys; missing ones are left out.
        :param refer: The option that replaces a section, with `{0}` for its key.
        :raises CheckpointError: The configuration cannot be read, or names code that is not trusted.
        """
        found = {}
        for name in names:
            way_out = f"name the {name} in the command, {refer.format(name)}"
            try:
                value = self.config.value(name)
            except CheckpointError as error:
                raise CheckpointError(f"{error} Otherwise {way_out}.") from error
            if value is None:
                continue
            refuse_foreign_targets(value, self.path, self.trusted_packages, way_out, name)
            if (guard := current_guard()) is not None:
                texts = ((f"{self.path}: {text.key}", text.value) for text in texts_of(value, name))
                guard.watch(self.directory, texts, self.trusted_packages)
            found[name] = value
        return found

    def deployed(self, device: str, state_dict_file: str) -> DeployedParts:
        """Return the configurations of environment, wrappers and policy.

        :param device: Device of the networks.
        :param state_dict_file: File of the weights.
        :raises CheckpointError: It is not a directory of a training run, or its configuration cannot be used.
        """
        for name in (str(STORED_CONFIG), state_dict_file, SPACES_FILE):
            if not (self.directory / name).is_file():
                raise CheckpointError(f"{self.directory} is not the directory of a training run: there is no {name}.")
        parts = self.sections(("env", "wrappers", "model"))
        for key in ("env", "model"):
            if not parts.get(key):
                raise CheckpointError(f"{self.path} is not the configuration of a training run: it has no `{key}`.")
        policy = {
            "_target_": "maze.core.agent.serialized_torch_policy.SerializedTorchPolicy",
            "model": parts["model"],
            "state_dict_file": state_dict_file,
            "spaces_dict_file": SPACES_FILE,
            "device": device,
        }
        return DeployedParts(parts["env"], parts.get("wrappers"), policy)


def read_plain_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file of a run as plain containers, without resolving references; empty if it holds no mapping."""
    try:
        content = read_yaml(path)
    except CheckpointError:
        return {}
    return content if isinstance(content, dict) else {}


def chosen_options(directory: Path) -> dict[str, Any]:
    """Return the option of each group that a run was started with, as far as known."""
    found: Any = read_plain_yaml(directory / _CHOICES)
    for key in ("hydra", "runtime", "choices"):
        found = found.get(key) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else {}


# -- trusted packages --------------------------------------------------------------------------------------------------

_NAMED: ContextVar[tuple[str, ...]] = ContextVar("maze_trusted_packages", default=())


@contextmanager
def trusting(packages: Sequence[str]) -> Iterator[None]:
    """Return a context in which stored configurations may name classes and functions of packages.

    :param packages: The packages.
    """
    token = _NAMED.set((*_NAMED.get(), *packages))
    try:
        yield
    finally:
        _NAMED.reset(token)


def trusted_here() -> tuple[str, ...]:
    """Return the packages that are trusted in this context, or stored for the working directory."""
    return (*_NAMED.get(), *remembered(Path.cwd()))


def remembered(directory: Path) -> tuple[str, ...]:
    """Return the packages that are stored as trusted for a directory.

    They are stored in the user's configuration, not in the directory, whose files may come from others.

    :param directory: The working directory.
    """
    packages = read_json_object(memory_file()).get(str(directory.resolve()))
    return tuple(str(package) for package in packages) if isinstance(packages, list) else ()


def remember(directory: Path, packages: Sequence[str]) -> Path:
    """Store packages as trusted for a working directory.

    :param directory: The directory.
    :param packages: The packages, in addition to the stored ones.
    :return: The file that holds them.
    """
    file = memory_file()
    known = {**read_json_object(file), str(directory.resolve()): sorted({*remembered(directory), *packages})}
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, json.dumps(known, indent=2) + "\n")
    return file


def memory_file() -> Path:
    """Return the file with the trusted packages of each directory."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "maze" / "trusted.json"
