"""The model a policy was trained with, read from the configuration that its training left behind."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from maze.core.errors import CheckpointError

STORED_CONFIG = Path(".hydra") / "config.yaml"
MODEL_KEYS = ("model", "critic", "policy.model", "env_model")
TRUSTED_PACKAGES = ("maze", "maze_envs", "torch")


def use_stored_model(cfg: DictConfig, overrides: Sequence[str], project: Path) -> None:
    """Takes over, in place, the model of the training run in ``input_dir``, unless the command names one itself.

    :param cfg: Configuration of a rollout.
    :param overrides: The command's arguments.
    :param project: Directory of the user's own code, whose classes may be named by a stored configuration.
    """
    policy = cfg.get("policy")
    if not cfg.get("input_dir") or not isinstance(policy, DictConfig) or "model" not in policy:
        return
    if any(
        override.lstrip("+~").startswith(("model", "critic", "policy.model", "env_model")) for override in overrides
    ):
        return
    stored = _stored_model(Path(cfg.input_dir) / STORED_CONFIG)
    if stored is None or stored == _plain(cfg, "model"):
        return
    _refuse_foreign_targets(stored, Path(cfg.input_dir), project)
    with open_dict(cfg):
        cfg.model = stored
    print(f"Using the model configuration of {cfg.input_dir}; name model=<option> to choose another.")


def _stored_model(path: Path) -> Any:
    if not path.is_file():
        return None
    try:
        return _plain(OmegaConf.load(path), "model")
    except (OmegaConfBaseException, YAMLError, UnicodeDecodeError, OSError) as error:
        raise CheckpointError(
            f"{path} cannot be read as the configuration of a training run ({type(error).__name__}). Name the model "
            f"the policy was trained with: model=<option>."
        ) from error


def _plain(cfg: Any, key: str) -> Any:
    node = OmegaConf.select(cfg, key)
    return OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node


def _refuse_foreign_targets(model: Any, input_dir: Path, project: Path) -> None:
    for target in _targets(model):
        package = target.partition(".")[0]
        if package not in TRUSTED_PACKAGES and not _belongs_to(package, project):
            raise CheckpointError(
                f"{input_dir / STORED_CONFIG} names {target}, which is neither part of Maze or torch nor of the "
                f"project in {project}. Stored configurations cannot run other code; if you trust it, name the model "
                f"yourself: model=<option>."
            )


def _targets(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        for key, value in node.items():
            if key == "_target_":
                yield str(value)
            yield from _targets(value)
            if isinstance(key, str) and "." in key:
                yield key
    elif isinstance(node, list):
        for value in node:
            yield from _targets(value)


def _belongs_to(package: str, project: Path) -> bool:
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return False
    places = [] if spec is None else [spec.origin, *(spec.submodule_search_locations or ())]
    installed = {"site-packages", "dist-packages"}
    return any(
        Path(place).resolve().is_relative_to(project.resolve()) and not installed & set(Path(place).parts)
        for place in places
        if place is not None
    )
