"""Torch networks (device, threads, parameters, weights, modes), and the base of policies and critics that hold them."""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from maze.core.annotations import override
from maze.core.env.structured_env import ActorID, StepKeyType
from maze.core.errors import CheckpointError, ConfigError, unknown_key_error
from maze.core.utils.checkpoint import listing
from maze.perception.blocks.recurrent.recurrent_cell import Run, recurrent_cells, running

logger = logging.getLogger(__name__)

SMALL_LAYER = 256 * 256
"""Largest number of weights of a layer for which one thread is used."""


def resolve_device(device: str, key: str = "device", default: str = "") -> str:
    """Return the device if it can be used.

    :param device: Its name.
    :param key: Its configuration key, for messages.
    :param default: The device of a configuration that names none: if it is `cuda`, a machine without a CUDA device
        uses the CPU instead, with a notice.
    :raises ConfigError: The device is unknown to torch or cannot be used here.
    """
    try:
        parsed = torch.device(device)
        if device == default and parsed.type == "cuda" and not torch.cuda.is_available():
            logger.info("%s: the default %s needs a CUDA device, which was not found; using cpu.", key, device)
            return "cpu"
        torch.empty(0, device=parsed)
    except (RuntimeError, TypeError, AssertionError, NotImplementedError) as error:
        raise ConfigError(
            f"{key}: {device!r} cannot be used on this machine: {error} Expected a device of torch {torch.__version__} "
            "that is there, such as `cpu` or `cuda`."
        ) from error
    return str(device)


def unique_parameters(networks: Iterable[nn.Module]) -> list[torch.Tensor]:
    """Return parameters of all networks, each one once although networks may share modules.

    :return: Each with the shape that it has in its network, `[...]`.
    """
    return list(dict.fromkeys(parameter for network in networks for parameter in network.parameters()))


@contextmanager
def threads_for(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Limit torch to one thread while networks of small dense layers learn.

    Threads wait for each other actively: on a machine with other work, several of them multiply the CPU time. Networks
    with convolutions or larger layers keep their threads, and so do processes with the environment variable
    `OMP_NUM_THREADS`.

    :param parameters: Parameters of the networks, each `[...]`.
    """
    is_small = all(parameter.ndim <= 2 and parameter.numel() <= SMALL_LAYER for parameter in parameters)
    if not is_small or "OMP_NUM_THREADS" in os.environ:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def check_networks(networks: Any, what: str) -> dict[Any, nn.Module]:
    """Return a plain dictionary of the networks, all of which are modules.

    :param networks: Networks by key.
    :param what: Their configuration key, for the message.
    :raises ConfigError: There are none, or one is not a module.
    """
    is_mapping = isinstance(networks, Mapping) and bool(networks)
    if not is_mapping or not all(isinstance(network, nn.Module) for network in networks.values()):
        raise ConfigError(f"{what}: expected a mapping from step keys to torch.nn.Modules, found {networks!r}.")
    return dict(networks)


def network_weights(networks: Mapping[Any, nn.Module]) -> dict[Any, dict[str, torch.Tensor]]:
    """Return the state dictionaries of all networks by their keys (references to the live tensors, as torch's own)."""
    return {key: dict(network.state_dict()) for key, network in networks.items()}


def load_network_weights(networks: Mapping[Any, nn.Module], state: Mapping[str, Any], group: str) -> None:
    """Copy saved weights into the networks, in place, after all of them were found to fit.

    :param networks: Networks by key.
    :param state: State dictionary; `state[group][key]` has the weights of a network by parameter.
    :param group: Key of these networks in the state dictionary.
    :raises CheckpointError: The weights do not fit; no network was changed.
    """
    check_network_weights(networks, state, group)
    for key, network in networks.items():
        network.load_state_dict(state[group][key])


def check_network_weights(networks: Mapping[Any, nn.Module], state: Any, group: str) -> None:
    """Compare saved weights with the networks, without changing them.

    :param networks: Networks by key.
    :param state: State dictionary; `state[group][key]` has the weights of a network by parameter.
    :param group: Key of these networks in the state dictionary.
    :raises CheckpointError: Lists every network and tensor that is missing, left over or of another shape.
    """
    if not isinstance(state, Mapping) or not isinstance(state.get(group), Mapping):
        groups = ", ".join(sorted(map(str, state))) if isinstance(state, Mapping) else type(state).__name__
        raise CheckpointError(f"The state dictionary has no `{group}`; found: {groups or 'nothing'}.")
    saved = state[group]
    problems = [f"network {key!r} is missing" for key in networks if key not in saved]
    problems += [f"network {key!r} is left over" for key in saved if key not in networks]
    for key, network in networks.items():
        expected, found = network.state_dict(), saved.get(key) or {}
        if key in saved:
            problems += [f"{key!r}: `{name}` is missing" for name in expected if name not in found]
            problems += [f"{key!r}: `{name}` is left over" for name in found if name not in expected]
        for name, tensor in expected.items():
            other = found.get(name, tensor)
            shape = tuple(other.shape) if isinstance(other, torch.Tensor) else type(other).__name__
            if shape != tuple(tensor.shape):
                problems.append(f"{key!r}: `{name}` is {shape}, the model has {tuple(tensor.shape)}")
    if problems:
        raise CheckpointError(
            f"The weights in `{group}` do not fit the model: {listing(problems, '; ')}. "
            "Build the model with the configuration that the weights were saved with."
        )


_DEPEND_ON_MODE = (nn.RNNBase, nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.RReLU)
_MODULES_THAT_DEPEND_ON_MODE = {f"torch.nn.modules.{name}" for name in ("batchnorm", "instancenorm", "dropout")}


def depends_on_mode(networks: Iterable[nn.Module]) -> bool:
    """Return whether outputs of networks may differ between training and evaluation mode.

    :param networks: Their modules outside torch and Maze are assumed to use the mode.
    """
    return any(
        isinstance(module, _DEPEND_ON_MODE)
        or not type(module).__module__.startswith(("torch.nn.", "maze.perception."))
        or any(base.__module__ in _MODULES_THAT_DEPEND_ON_MODE for base in type(module).__mro__)
        for network in networks
        for module in network.modules()
    )


def as_float_tensors(observation: Mapping[str, Any], device: str) -> dict[str, torch.Tensor]:
    """Return network inputs: tensors of torch's default floating type on `device`, copied only where necessary.

    Integer and boolean observations become floating numbers too; a network with an index embedding casts back.

    :param observation: Arrays or tensors `[..., *space.shape]` by key; the shapes stay.
    :param device: Name of the device.
    """
    dtype = torch.get_default_dtype()
    tensors: dict[str, torch.Tensor] = {}
    for key, value in observation.items():
        tensor = value if isinstance(value, torch.Tensor) else torch.as_tensor(np.asarray(value))
        if tensor.dtype is not dtype or str(tensor.device) != device:
            tensor = tensor.to(device=device, dtype=dtype)
        tensors[key] = tensor
    return tensors


class TargetNetworks:
    """Slowly updated copies of networks, which compute the targets of learning.

    Parameters move towards those that they follow (Polyak averaging, Lillicrap et al. 2016; all the way is the hard
    update of Mnih et al. 2015). Buffers, such as running statistics, masks and counters, are copied: gradients
    do not change them, and some (infinite masks, counters) cannot be averaged.

    :param targets: The networks that follow; they get no gradients.
    :param sources: The networks that are followed, in the same order.
    """

    def __init__(self, targets: Iterable[nn.Module], sources: Iterable[nn.Module]) -> None:
        targets, sources = list(targets), list(sources)
        self._networks = targets
        self._targets: list[torch.Tensor] = [p for each in targets for p in each.parameters()]
        self._sources: list[torch.Tensor] = [p for each in sources for p in each.parameters()]
        buffers = ([buffer for each in part for buffer in each.buffers()] for part in (targets, sources))
        self._buffers = list(zip(*buffers, strict=True))

    @torch.no_grad()
    def update(self, tau: float) -> None:
        """Move the targets: `target <- (1 - tau) * target + tau * source`.

        :param tau: 0: parameters stay, 1: they become those that are followed.
        """
        torch._foreach_lerp_(self._targets, self._sources, tau)
        for target, source in self._buffers:
            target.copy_(source)

    def state_dict(self) -> dict[str, Any]:
        """Return the weights of the targets, for algorithms whose model does not contain them."""
        return {str(index): dict(network.state_dict()) for index, network in enumerate(self._networks)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from weights that :meth:`state_dict` gave.

        :param state_dict: The weights, which are copied into the targets.
        :raises KeyError: Weights of a network are missing.
        :raises RuntimeError: Weights do not fit a network.
        """
        for index, network in enumerate(self._networks):
            network.load_state_dict(state_dict[str(index)])


class TorchModel(ABC):
    """Hold torch networks without being an `nn.Module` itself.

    :param device: Device of the networks, e.g. `cpu` or `cuda`.
    """

    def __init__(self, device: str) -> None:
        self._device = resolve_device(device)

    is_recurrent: bool = False
    """Whether networks carry hidden states from step to step."""

    @property
    def num_params(self) -> int:
        """Number of scalar parameters."""
        return sum(parameter.numel() for parameter in self.parameters())

    @property
    def device(self) -> str:
        """Device that the networks are on."""
        return self._device

    @property
    def trained_networks(self) -> list[nn.Module]:
        """The networks that are trained; models without it override :meth:`parameters`, :meth:`eval`, :meth:`train`."""
        raise NotImplementedError

    def parameters(self) -> list[torch.Tensor]:
        """Return all parameters, each one once.

        :return: Each with the shape that it has in its network, `[...]`.
        """
        return unique_parameters(self.trained_networks)

    def eval(self) -> None:
        """Switch dropout, batch normalisation and the like to evaluation."""
        for network in self.trained_networks:
            network.eval()

    def train(self) -> None:
        """Switch dropout, batch normalisation and the like to training."""
        for network in self.trained_networks:
            network.train()

    @abstractmethod
    def to(self, device: str) -> None:
        """Move the networks, in place.

        :param device: Name of the device, such as `cpu` or `cuda:1`.
        :raises ConfigError: The device is unknown to torch or cannot be used here.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return weights of all networks; loads with `torch.load(..., weights_only=True)`."""

    @abstractmethod
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy weights into the networks; nothing changes when they do not fit.

        :param state_dict: A result of :meth:`state_dict`; further groups of weights are ignored.
        :raises CheckpointError: Networks or tensors are missing, left over or of other shapes.
        """

    def rng_state(self) -> dict[str, Any]:
        """Return the state of generators: integers and tensors, which load with `weights_only=True`. Default: none."""
        return {}

    def set_rng_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of :meth:`rng_state`.

        :param state: The state, which is copied.
        """


class NetworksModel(TorchModel):
    """A model that consists of networks by key.

    :param networks: The networks; they are moved to the device.
    :param device: Device of the networks.
    :param name: Name of the networks in messages.
    """

    state_group: ClassVar[str]
    """Under which name the state holds the networks."""

    substeps_with_separate_agent_nets: Sequence[StepKeyType] = ()
    """Sub-steps in which each agent has a network of its own, with the key `(step key, agent)`."""

    def __init__(self, networks: Mapping[Any, nn.Module], device: str, name: str) -> None:
        super().__init__(device)
        self.networks: dict[Any, Any] = check_networks(networks, name)
        self._name = name
        self._cells = {key: recurrent_cells(network) for key, network in self.networks.items()}
        self.is_recurrent = any(self._cells.values())
        self._move_networks()

    def network_key(self, actor_id: ActorID | None) -> Any:
        """Return the key of the network of an actor.

        :param actor_id: The actor; `None`: the only network there is.
        :raises ConfigError: There is no network for the actor, or several ones and no actor is named.
        """
        if actor_id is None:
            if len(self.networks) > 1:
                raise ConfigError(f"{self._name}: there are {list(self.networks)}; pass `actor_id`.")
            return next(iter(self.networks))
        key = tuple(actor_id) if actor_id[0] in self.substeps_with_separate_agent_nets else actor_id[0]
        self._network(key)
        return key

    def _network(self, key: Any) -> Any:
        if key not in self.networks:
            raise unknown_key_error(f"{self._name}: step key", key, self.networks)
        return self.networks[key]

    def state_sizes(self, actor_id: ActorID | None) -> dict[str, int]:
        """Return sizes of the hidden states of an actor, by state key; empty where its network carries none."""
        return {key: cell.state_size for key, cell in self._cells[self.network_key(actor_id)].items()}

    def running_for(self, actor_id: ActorID | None, run: Run) -> AbstractContextManager[None]:
        """Return a context in which an actor's network takes its hidden states from a run.

        :param actor_id: The actor; `None`: the only network there is.
        :param run: Source of the hidden states; without effect on networks that carry none.
        """
        return running(self._cells[self.network_key(actor_id)].values(), run)

    def _outputs(self, key: Any, tensors: dict[str, torch.Tensor], run: Run | None = None) -> Any:
        """Evaluate a network.

        :param key: Its key.
        :param tensors: Its inputs.
        :param run: Source of its hidden states; `None`: it carries none, or is in :meth:`running_for`.
        """
        network, cells = self._network(key), self._cells.get(key, {}).values()
        if run is not None:
            with running(cells, run):
                return network(tensors)
        if cells and any(cell.run is None for cell in cells):
            raise ConfigError(
                f"{type(self).__name__}: network {key!r} carries hidden states from step to step, which are not "
                "available here. Train it with PPO or A2C and evaluate it in an environment; for all else use a model "
                "without `RecurrentCellBlock` (`model.recurrence=true` with stacked observations)."
            )
        return network(tensors)

    def _one_value(
        self, outputs: Mapping[str, torch.Tensor], name: str, batch_shape: tuple[int, ...], key: Any
    ) -> torch.Tensor:
        """Return the output of a critic's network that has one value for each element of the batch, in the batch's
        shape.
        """
        value = outputs.get(name)
        if value is None:
            raise ConfigError(f"critic.networks[{key!r}] returned {sorted(map(str, outputs))}, expected `{name}`.")
        if value.shape == batch_shape:
            return value
        if value.shape == (*batch_shape, 1):
            return value.squeeze(-1)
        raise ConfigError(
            f"critic.networks[{key!r}] returned values of shape {tuple(value.shape)} for a batch of shape "
            f"{tuple(batch_shape)}; expected {(*batch_shape, 1)}, one value for each element of the batch."
        )

    @property
    @override(TorchModel)
    def trained_networks(self) -> list[nn.Module]:
        return list(self.networks.values())

    @override(TorchModel)
    def to(self, device: str) -> None:
        self._device = resolve_device(device)
        self._move_networks()

    def _move_networks(self) -> None:
        for network in self.networks.values():
            network.to(self._device)

    @override(TorchModel)
    def state_dict(self) -> dict[str, Any]:
        return {self.state_group: network_weights(self.networks)}

    @override(TorchModel)
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load weights of these networks, or of an actor-critic that contains them."""
        load_network_weights(self.networks, state_dict, self.state_group)
