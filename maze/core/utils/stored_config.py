"""Configurations that lie in the directories of earlier runs, and may come from anybody.

Building a configuration calls what it names. Of a stored one therefore only classes of known kinds are built: what the
name leads to is judged, not how it is spelt, and wherever in the configuration it stands.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import AliasEvent, YAMLError

from maze.core.errors import CheckpointError
from maze.core.utils.factory import TARGET_KEY
from maze.core.utils.targets import is_file_name

# fmt: off
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
    "maze_envs.logistics.cutting_2d.demand_generator.demand_generator.DemandGenerator",
    "torch.nn.modules.module.Module",
    "torch.optim.optimizer.Optimizer",
})
"""A class is of a known kind if it, or a class that it derives from, is one of these."""

_FUNCTIONS = frozenset({
    "maze.interop.pettingzoo_env.make_pettingzoo_env",
    "maze.core.wrappers.maze_gym_env_wrapper.make_gym_maze_env",
    "maze_envs.logistics.dispatching.maze_env.dispatching_env",
    "maze_envs.logistics.dispatching.maze_env.flat_dispatching_env",
    "maze_envs.robotics.pick_and_place.maze_env.flat_pick_and_place_env",
    "maze_envs.robotics.pick_and_place.maze_env.pick_and_place_env",
})
"""Functions that make environments."""
# fmt: on

_LIBRARIES = ("gymnasium", "maze", "maze_envs", "torch")
NEVER_WHOLE = frozenset(
    {*_LIBRARIES, "builtins", "hydra", "hydra_plugins", "numpy", "omegaconf", *sys.stdlib_module_names}
)
"""Packages whose functions could do anything: naming one of their classes does not make all of them trusted."""
_REGISTERS_ENVIRONMENTS = frozenset({"ale_py"})
"""Packages that configurations of Maze have imported for the environments that they register."""
_IMPORTED_ON_DEMAND = ("maze", "maze_envs")
_TORCH_MODULES = ("torch.nn.modules.", "torch.optim.")

_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")
_MODULE_AND_ID = re.compile(r"([^\W\d]\w*)[\w.]*:[^\s:]+")
_SPACE = re.compile(r"(gym|gymnasium)\.spaces\.\w+")  # taken from gymnasium, whatever it says
_INTERPOLATION = re.compile(r"\$\{([^}]*)")
_IMPORTS = "import"
"""Key of an environment's configuration for modules that are imported first."""
_WRITES_FILES = "RecordVideo"
_RESOLVERS = frozenset({"now", "oc.dict.keys", "oc.dict.values", "oc.env", "oc.select"})


def refuse_foreign_targets(config: Any, path: Path, trusted_packages: Sequence[str] = (), way_out: str = "") -> None:
    """Raises where a stored configuration names code that its reader has not chosen.

    Allowed are, at any depth: classes of known kinds (environments, wrappers, policies, networks, their parts) of Maze
    and torch, the functions that make Maze's own environments, and whatever is defined in the trusted packages.

    :param config: The configuration, of plain containers.
    :param path: The file that it comes from.
    :param trusted_packages: Packages of the user's own. Maze, torch, Python's own and a few others are never trusted as
        a whole, even if they are named.
    :param way_out: What to do if the code is trusted after all.
    """
    trusted = tuple(package for package in trusted_packages if package not in NEVER_WHOLE)
    for text, is_target in _texts(config):
        reason = _objection(text, is_target, trusted)
        if isinstance(text, str) and text.rpartition(".")[2] == _WRITES_FILES:
            reason = "writes files wherever it is told to"
        if reason:
            package = re.split("[.:]", str(text))[0]
            name_it = "" if package in NEVER_WHOLE else f" If you trust it, {way_out}trusted_packages=[{package!r}]."
            raise CheckpointError(
                f"{path} names {text}, which {reason}. Stored configurations are built of classes of known kinds "
                "(environments, wrappers, policies, networks and their parts) of Maze and torch, and of the packages "
                f"that you name.{name_it}"
            )


def read_stored_config(path: Path, way_out: str = "") -> DictConfig:
    """Reads the configuration that a run has left, without resolving what it refers to.

    :param path: The file.
    :param way_out: What to do if it cannot be read.
    :raises CheckpointError: It is no configuration, or calls functions to get values.
    """
    try:
        if any(isinstance(event, AliasEvent) for event in yaml.parse(path.read_text(encoding="utf-8"))):
            raise CheckpointError(
                f"{path} repeats parts of itself by references, which no run writes. {way_out}".strip()
            )
        config = OmegaConf.load(path)
        plain = OmegaConf.to_container(config, resolve=False)
    except (OmegaConfBaseException, YAMLError, UnicodeDecodeError, OSError, RecursionError) as error:
        raise CheckpointError(
            f"{path} cannot be read as the configuration of a training run ({type(error).__name__}). {way_out}".strip()
        ) from error
    if not isinstance(config, DictConfig):
        raise CheckpointError(f"{path} cannot be read as the configuration of a training run: it holds no mapping.")
    for text, _ in _texts(plain):
        for match in _INTERPOLATION.finditer(text if isinstance(text, str) else ""):
            resolver, colon, _ = match[1].partition(":")
            if "$" in match[1] or (colon and resolver.strip() not in _RESOLVERS):
                raise CheckpointError(
                    f"{path} holds `{text}`, and stored configurations may only refer to other values in them. "
                    f"Allowed functions: {', '.join(sorted(_RESOLVERS))}."
                )
    return config


def _texts(node: Any) -> Iterator[tuple[Any, bool]]:
    """All texts in a configuration, keys included, and whether they stand where a class or function is named."""
    if isinstance(node, dict):
        for key, value in node.items():
            if key == TARGET_KEY:
                yield value, True
            elif key == _IMPORTS:
                yield from ((f"{name}:*", False) for name in ([value] if isinstance(value, str) else value or ()))
            else:
                yield key, False
                yield from _texts(value)
    elif isinstance(node, (list, tuple)):
        for value in node:
            yield from _texts(value)
    else:
        yield node, False


def _objection(text: Any, is_target: bool, trusted: tuple[str, ...]) -> str:
    """Why a text must not be taken for a name by those who build the configuration; empty if nothing is wrong."""
    if not isinstance(text, str):
        return "is no dotted path to a class" if is_target else ""
    if "${" in text:
        return "would be resolved after it has been judged"
    if with_module := _MODULE_AND_ID.fullmatch(text):  # gymnasium imports the module that such an id begins with
        is_known = with_module[1] in trusted or with_module[1] in _REGISTERS_ENVIRONMENTS
        is_foreign = not is_known and is_importable(with_module[1])
        return "has a module imported" if is_foreign else ""
    if _PATH.fullmatch(text) and not _SPACE.fullmatch(text) and not is_file_name(text):
        return _objection_to_path(text, is_target, trusted)
    # Short names are those of wrappers, which whoever builds them looks up among his own.
    return "is no dotted path to a class" if is_target and "." in text else ""


def _objection_to_path(path: str, is_target: bool, trusted: tuple[str, ...]) -> str:
    package = path.partition(".")[0]
    if package not in (*_LIBRARIES, *trusted):
        return "is part of neither" if is_target or is_importable(package) else ""
    found = _find(path)
    if found is None:
        return "does not exist there" if is_target else ""
    return _objection_to(found, path, trusted)


def _objection_to(found: Any, path: str, trusted: tuple[str, ...]) -> str:
    if isinstance(found, ModuleType) or not callable(found):
        return "is no class"
    own_path = _own_path(found)
    package = own_path.partition(".")[0]
    if package != path.partition(".")[0]:
        return f"is {own_path}, found through what another module imports"
    if package in trusted or own_path in _FUNCTIONS:
        return ""
    if not isinstance(found, type):
        return "is a function, and functions are not called for a stored configuration"
    if package == "torch" and not own_path.startswith(_TORCH_MODULES):
        return "is none of torch's networks, their parts or optimizers"
    return "" if any(_own_path(base) in _KINDS for base in found.__mro__) else "is of no known kind"


def _find(path: str) -> Any:
    """The object at a path, of a module's own names only; None if there is none. Imports modules of Maze alone."""
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
    is_imported_on_demand = name.partition(".")[0] not in _LIBRARIES or name.startswith(
        tuple(f"{package}." for package in _IMPORTED_ON_DEMAND)
    )
    if found is None and is_imported_on_demand and not name.endswith("__main__"):
        try:
            return importlib.import_module(name)
        except ImportError:
            return None
    return found


def _own_path(found: Any) -> str:
    return f"{getattr(found, '__module__', '')}.{getattr(found, '__qualname__', '')}"


def is_own_package(package: str) -> bool:
    """Whether a package is the user's own code rather than an installed library, as far as its place tells.

    :param package: Name without dots; the package is not imported.
    """
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return False
    places = [] if spec is None else [spec.origin, *(spec.submodule_search_locations or ())]
    known = [place for place in places if place is not None]
    return bool(known) and not any({"site-packages", "dist-packages"} & set(Path(place).parts) for place in known)


def is_importable(package: str) -> bool:
    """Whether there is a package or module of this name; nothing but its parents is imported to find out."""
    if package in sys.modules:
        return True
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False
