"""Weights on their way between a Maze model and RLlib's modules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from maze.core.errors import MazeError, NonFiniteError

Parts = Mapping[str, nn.Module]
"""Networks by the attribute of the module that trains them."""


def to_module_state(parts: Parts, state: Mapping[str, Any], targets: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """A module's state with the weights of a Maze model.

    :param parts: Networks of the model.
    :param state: The module's own state, as NumPy arrays; what is not in the model stays as it is.
    :param targets: Pairs of a network and the target network that begins as its copy, by their attributes.
    """
    changed = dict(state)
    for name, network in parts.items():
        for key, tensor in network.state_dict().items():
            full_key = f"{name}.{key}"
            if full_key in changed:
                changed[full_key] = tensor.detach().cpu().numpy().copy()
    for name, target in targets:
        prefix = f"{name}."
        copies = {f"{target}.{key[len(prefix) :]}": value for key, value in changed.items() if key.startswith(prefix)}
        changed.update({key: np.array(value) for key, value in copies.items() if key in changed})
    return changed


TARGETS = (("policy_net", "target_policy_net"), ("qf", "target_qf"), ("qf_twin", "target_qf_twin"))
"""Pairs of a network and the one that follows it later, by their attributes."""


def buffer_state(parts: Parts, state: Mapping[str, Any]) -> dict[str, Any]:
    """What is not trained of a Maze model, such as statistics of observations, as a part of a module's state.

    :param parts: Networks of the model.
    :param state: The module's own state, as NumPy arrays.
    """
    changed = to_module_state(parts, state, TARGETS)
    followers = dict(TARGETS)
    names = [
        f"{prefix}.{name}"
        for part, network in parts.items()
        for name, _ in network.named_buffers()
        for prefix in (part, followers.get(part, part))
    ]
    return {name: changed[name] for name in names if name in changed}


def load_into_runner(buffers: Mapping[str, Mapping[str, Any]], env_runner: Any) -> None:
    """Gives the modules of an env runner a part of their state; runs in its process.

    RLlib itself takes no weights of an update that the runner knows already.

    :param buffers: The parts by module.
    :param env_runner: The env runner.
    """
    from ray.rllib.core.rl_module.multi_rl_module import MultiRLModule

    if env_runner.module is None:  # a runner without environments
        return
    for module, part in buffers.items():
        found = env_runner.module[module] if isinstance(env_runner.module, MultiRLModule) else env_runner.module
        own = found.state_dict()
        tensors = {name: torch.as_tensor(np.array(value)) for name, value in part.items() if name in own}
        found.load_state_dict(tensors, strict=False)


def load_module_state(parts: Parts, state: Mapping[str, Any], where: str) -> None:
    """Gives the networks of a Maze model, in place, the weights of an RLlib module.

    :param parts: Networks of the model.
    :param state: The module's state, as NumPy arrays.
    :param where: The module, for messages.
    :raises MazeError: The module has other weights; the model is left as it was.
    """
    loaded: list[tuple[nn.Module, dict[str, torch.Tensor]]] = []
    for name, network in parts.items():
        weights = {}
        for key, tensor in network.state_dict().items():
            found = state.get(f"{name}.{key}")
            if found is None:
                raise MazeError(f"RLlib's module {where} has no weights `{name}.{key}`; found {sorted(state)[:6]} ...")
            weights[key] = torch.as_tensor(np.array(found), dtype=tensor.dtype)
        loaded.append((network, weights))
    for network, weights in loaded:
        network.load_state_dict(weights)


def require_finite(weights: Mapping[str, Mapping[str, Any]], when: str) -> None:
    """Refuses weights that are NaN or infinite; RLlib itself trains on with them.

    :param weights: States of all modules.
    :param when: For the message.
    :raises NonFiniteError: Names module and weights.
    """
    for module, state in weights.items():
        for name, value in state.items():
            array = np.asarray(value)
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise NonFiniteError(
                    f"{when}: the weights `{name}` of RLlib's module {module} are not finite. Look at rewards and "
                    "observations of the environment, or reduce algorithm.config.lr. The best policy so far is kept."
                )
