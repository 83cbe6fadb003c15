"""The model a policy was trained with, read from the configuration that its training left behind."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from maze.core.errors import CheckpointError
from maze.core.utils.stored_config import refuse_foreign_targets

STORED_CONFIG = Path(".hydra") / "config.yaml"


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
    way_out = "if you trust it, name the model yourself: model=<option>."
    path = Path(cfg.input_dir) / STORED_CONFIG
    refuse_foreign_targets(stored, path, project, packages_with_configurations(), way_out)
    with open_dict(cfg):
        cfg.model = stored
    print(f"Using the model configuration of {cfg.input_dir}; name model=<option> to choose another.")


def packages_with_configurations() -> list[str]:
    """Packages that an installed search path plugin, or the command, has Hydra look for configurations in."""
    if not HydraConfig.initialized():
        return []
    sources = HydraConfig.get().runtime.config_sources
    return [str(source.path).partition(".")[0] for source in sources if source.schema == "pkg"]


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
