"""A trained policy, loaded from the files of its run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maze.core.agent.torch_actor_critic import TorchActorCritic
from maze.core.agent.torch_model import resolve_device
from maze.core.agent.torch_policy import TorchPolicy
from maze.core.agent.torch_state_critic import TorchStateCritic
from maze.core.errors import ConfigError, MazeError
from maze.core.utils.checkpoint import load_into, load_state
from maze.core.utils.config_utils import number
from maze.core.utils.factory import ConfigType, Factory


class SerializedTorchPolicy(TorchPolicy):
    """Build the policy of a model configuration and load its weights. Nothing in the files is executed.

    Networks are in evaluation mode.

    :param model: The model configuration of the run (`model` in its `hydra_config.yaml`).
    :param state_dict_file: Weights, of the policy or of an actor-critic: `state_dict.pt`.
    :param spaces_dict_file: Spaces of the environment: `spaces_config.pkl`.
    :param device: `cpu` or `cuda`.
    :param temperature: Temperature of sampled actions: below 1 sharpens, above 1 flattens the distributions, which
        the best of many samples (`runner.best_of`) can profit from. Deterministic actions stay the same.
    :raises ConfigError: The model configuration has no policy, or the temperature is not a number above 0.
    :raises CheckpointError: The weights cannot be read, or do not fit.
    """

    def __init__(
        self, model: ConfigType, state_dict_file: str, spaces_dict_file: str, device: str, temperature: float = 1.0
    ) -> None:
        from maze.perception.models.space_config import SpacesConfig

        self.spaces = SpacesConfig.load(spaces_dict_file)
        """Spaces of the environment that it was trained in."""
        policy = _composed(model, self.spaces).policy
        if policy is None:
            raise ConfigError("model.policy: missing; this model configuration has no policy to roll out.")
        device = resolve_device(device, "policy.device")
        super().__init__(policy.networks, policy.distribution_mapper, device, policy.substeps_with_separate_agent_nets)
        self.temperature = number("policy.temperature", temperature, 0.0, above=True)
        weights = load_state(state_dict_file)
        if "policies" not in weights and isinstance(weights.get("model"), Mapping):
            weights = weights["model"]  # of a trainer's whole state
        load_into(self, weights, Path(state_dict_file))
        self.eval()


def trained_actor_critic(config: Any, policy: Any, directory: str = "") -> TorchActorCritic | None:
    """Return a policy with the state critic of its training run; `None`: there is no state critic.

    :param config: The configuration that the policy was built from.
    :param policy: The policy.
    :param directory: Directory that the file names refer to.
    """
    if not isinstance(config, Mapping) or not hasattr(policy, "spaces"):
        return None
    try:
        composer = _composed(config["model"], policy.spaces)
        if composer.policy is None or not isinstance(composer.critic, TorchStateCritic):
            return None
        actor_critic = TorchActorCritic(composer.policy, composer.critic, policy.device)
        actor_critic.load_state_dict(load_state(Path(directory) / str(config["state_dict_file"])))
        actor_critic.eval()
    except MazeError:
        return None
    return actor_critic


def _composed(model: ConfigType, spaces: Any) -> Any:
    """Return the composer of a model configuration, for the spaces of an environment."""
    from maze.perception.models.model_composer import BaseModelComposer  # upwards of this package

    return Factory(BaseModelComposer).instantiate(model, config_path="model", **vars(spaces))  # type: ignore[type-abstract]
