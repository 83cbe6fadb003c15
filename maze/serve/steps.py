"""The sub-steps of a bundle: what their actors' networks take and give, and the networks, ONNX graphs run by
onnxruntime."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from maze.core.errors import (
    ConfigError,
    EnvironmentContractError,
    NonFiniteError,
    install_command,
    unknown_key_error,
)
from maze.distributions.samplers import (
    Sampler,
    categorical_sizes,
    check_logits,
    choice_probabilities,
    most_probable,
    sampler_of,
)
from maze.serve.bundle_file import BundleError
from maze.serve.pipeline import StepKey

Array = np.ndarray[Any, Any]

SMALL_NETWORK = 2**22
"""Bytes of a graph below which one thread is as fast as several."""
STATE, NEXT_STATE = "state/", "next_state/"
"""What the names of hidden states in a graph begin with, those before a step and those after it."""


class BundledNetwork:
    """A graph whose inputs are entries of observations and whose outputs are logits.

    The hidden states of a recurrent network are further inputs, and those that follow further outputs.

    :param content: The graph, all of it: it refers to no other file.
    :param description: `inputs` (names in the graph by entry), `outputs` (names in the graph by head), and of recurrent
        networks `states` (sizes by state key).
    :param n_threads: See :class:`~maze.serve.bundle.PolicyBundle`.
    :raises BundleError: onnxruntime is missing, or cannot read the graph.
    """

    def __init__(self, content: bytes, description: Mapping[str, Any], n_threads: int | None = None) -> None:
        refuse_external_data(content)
        try:
            import onnxruntime
        except ImportError as error:
            raise BundleError(f"Acting needs onnxruntime: {install_command('serve')}.") from error
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = n_threads or (1 if len(content) < SMALL_NETWORK else 0)
        options.inter_op_num_threads = 1
        try:
            session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime has a type of exception for each kind of fault
            raise BundleError(f"onnxruntime cannot read a network of the bundle: {error}") from error
        self._run = session.run
        self.state_sizes: Mapping[str, int] = {key: int(size) for key, size in description.get("states", {}).items()}
        """Sizes of the hidden states by state key; empty where none are carried."""
        self._inputs = [*description["inputs"].items(), *((key, STATE + key) for key in self.state_sizes)]
        outputs = {**description["outputs"], **{key: NEXT_STATE + key for key in self.state_sizes}}
        self._keys, self._outputs = list(outputs), list(outputs.values())
        shapes = {each.name: each.shape for each in session.get_inputs()}
        missing = {name for _, name in self._inputs} ^ shapes.keys()
        missing |= {STATE + key for key, size in self.state_sizes.items() if shapes.get(STATE + key, ())[1:] != [size]}
        missing |= set(self._outputs) - {each.name for each in session.get_outputs()}
        if missing:
            raise BundleError(f"A network of the bundle and its description do not agree on {sorted(missing)}.")

    def __call__(self, batch: Mapping[str, Array]) -> dict[str, Array]:
        """Logits `[batch, ...]` by head, and the hidden states that follow, `[batch, size]` by state key.

        :param batch: Arrays of float32 `[batch, ...]` by entry, hidden states by state key among them.
        """
        outputs = self._run(self._outputs, {name: batch[entry] for entry, name in self._inputs})
        return dict(zip(self._keys, outputs, strict=True))


@dataclass(frozen=True)
class Head:
    """An action head: how its logits become actions.

    :param name: Of the head.
    :param description: Its distribution as data, see :mod:`maze.distributions.samplers`.
    :param space: The head's space as data.
    """

    name: str
    description: Mapping[str, Any]
    space: Mapping[str, Any]
    sampler: Sampler
    sizes: Sequence[int]


@dataclass(frozen=True)
class StepSpec:
    """A sub-step: what its actor observes and does. Spaces are mappings that are JSON."""

    step_key: StepKey
    n_agents: int
    """Number of agents; -1 where it varies."""
    observation_space: Mapping[str, Mapping[str, Any]]
    """By entry; as the environment converts it, before all wrappers."""
    action_space: Mapping[str, Mapping[str, Any]]
    """By entry; as the environment takes it, after all wrappers."""
    observation_kind: str
    """How the raw environment packs observations: `single`, `dict`, `tuple`, or `converted` by code of its own."""
    action_kind: str
    """How the raw environment packs actions: `single`, `dict`, `tuple`, or `converted` by code of its own."""
    inputs: Mapping[str, tuple[int, ...]]
    """Shapes of what the networks take, without the batch dimension."""
    masks: Mapping[str, str]
    """By head the entry of the observation that masks its actions."""
    heads: Mapping[str, Head]
    observation_operations: Sequence[Mapping[str, Any]]
    action_operations: Sequence[Mapping[str, Any]]
    networks: Mapping[int | None, BundledNetwork]
    """By agent; None: of all agents."""
    where: str
    """Its name in messages."""

    @property
    def operations(self) -> Sequence[Mapping[str, Any]]:
        """Everything between the raw environment and the networks, see :mod:`maze.serve.pipeline`."""
        return (*self.observation_operations, *self.action_operations)

    def network(self, agent_id: int = 0) -> BundledNetwork:
        """The network that acts for an agent.

        :raises ConfigError: There is no such agent.
        """
        network = self.networks.get(None)
        if network is None:
            network = self.networks.get(agent_id)
            if network is None:
                raise unknown_key_error(f"Sub-step {self.step_key!r}: agent", agent_id, self.networks)
        return network

    def states_before(
        self, states: Mapping[str, Any] | None, episode_start: Any, n_rows: int, agent_id: int = 0
    ) -> dict[str, Array]:
        """The hidden states that an agent's network goes on with, `[n_rows, size]` by state key; empty where it
        carries none.

        :param states: See :meth:`PolicyBundle.act_batch`.
        :param episode_start: See :meth:`PolicyBundle.act_batch`.
        :param n_rows: How many rows there are.
        :param agent_id: The agent.
        :raises ConfigError: They are missing, or have other names or shapes.
        :raises NonFiniteError: They are not finite.
        """
        sizes = self.network(agent_id).state_sizes
        if unknown := [key for key in states or {} if key not in sizes]:
            raise ConfigError(
                f"{self.where}: `states` has {unknown}; the network carries {list(sizes) or 'no hidden states'}."
            )
        if not sizes:
            return {}
        begins = np.zeros(n_rows, np.bool_)
        if episode_start is not None:
            start = np.asarray(episode_start)
            if start.dtype != np.bool_ or start.shape not in {(), (n_rows,)}:
                raise ConfigError(
                    f"{self.where}: `episode_start` is true or false for each of {n_rows} rows, got {episode_start!r}."
                )
            begins[:] = start
        if not states:
            if not begins.all():
                raise ConfigError(
                    f"{self.where}: the policy carries hidden states from step to step, and there are none. Pass as "
                    "`states` those of the answer before, and `episode_start=True` where an episode begins."
                )
            return {key: np.zeros((n_rows, size), np.float32) for key, size in sizes.items()}
        before = {}
        for key, size in sizes.items():
            try:
                with np.errstate(over="ignore"):
                    array = np.array(states[key], np.float32)
            except (KeyError, ValueError, TypeError) as error:
                raise ConfigError(
                    f"{self.where}: `states[{key!r}]` is missing or has no numbers ({type(error).__name__}); expected "
                    f"the shape {[n_rows, size]}."
                ) from error
            if array.shape != (n_rows, size):
                raise ConfigError(
                    f"{self.where}: `states[{key!r}]` has the shape {list(array.shape)}, expected {[n_rows, size]}."
                )
            array[begins] = 0.0
            if not np.isfinite(array).all():
                raise NonFiniteError(f"{self.where}: `states[{key!r}]` is not finite.")
            before[key] = array
        return before

    def network_inputs_of(self, entries: Mapping[str, Any]) -> dict[str, Array]:
        """The entries that the networks take, as arrays of float32.

        :raises EnvironmentContractError: One is missing, or has another shape.
        """
        inputs = {}
        for name, shape in self.inputs.items():
            try:
                array = np.asarray(entries[name], np.float32)
            except (KeyError, ValueError, TypeError) as error:
                raise EnvironmentContractError(
                    f"Sub-step {self.step_key!r}: the network takes {list(self.inputs)}; `{name}` is missing or has no "
                    f"numbers ({type(error).__name__}), there is {list(entries)!s:.200}."
                ) from error
            if array.shape != shape:
                raise EnvironmentContractError(
                    f"Sub-step {self.step_key!r}: the network takes `{name}` of shape {shape}, found {array.shape}."
                )
            inputs[name] = array
        return inputs

    def batch_of(self, observations: Mapping[str, Any]) -> dict[str, Array]:
        """The entries that the networks take, as arrays of float32 `[batch, *shape]`.

        :raises EnvironmentContractError: One is missing, or has another shape.
        """
        batch: dict[str, Array] = {}
        n_rows = None
        for name, shape in self.inputs.items():
            try:
                array = np.asarray(observations[name], np.float32)
            except (KeyError, ValueError, TypeError) as error:
                raise EnvironmentContractError(
                    f"Sub-step {self.step_key!r}: the network takes {list(self.inputs)}; `{name}` is missing or has no "
                    f"numbers ({type(error).__name__})."
                ) from error
            n_rows = len(array) if n_rows is None and array.ndim else n_rows
            if array.ndim == 0 or array.shape != (n_rows, *shape) or n_rows == 0:
                raise EnvironmentContractError(
                    f"Sub-step {self.step_key!r}: the network takes `{name}` of shape {['batch', *shape]}, "
                    f"found {list(array.shape)}."
                )
            batch[name] = array
        return batch

    def outputs(self, batch: Mapping[str, Array], agent_id: int = 0) -> tuple[dict[str, Array], dict[str, Array]]:
        """Compute checked logits `[batch, ...]` by head, and the hidden states that follow, `[batch, size]` by key.

        :param batch: What the network takes, `[batch, ...]` by entry, hidden states by state key among them.
        :param agent_id: The agent.
        """
        network = self.network(agent_id)
        logits = network(batch)
        following = {key: logits.pop(key) for key in network.state_sizes} if network.state_sizes else {}
        for head, values in logits.items():
            check_logits(values, self.heads[head].sizes, head, self.where)
        return logits, following

    def act_one(
        self, inputs: Mapping[str, Array], agent_id: int, rng: np.random.Generator | None, temperature: float
    ) -> tuple[dict[str, Any], dict[str, Array]]:
        """Act on one observation with as little overhead as possible.

        :param inputs: Checked entries `[*shape]` by name, hidden states `[size]` by state key among them.
        :param agent_id: The agent.
        :param rng: Draws the action; None: the most probable one.
        :param temperature: See :meth:`~maze.serve.bundle.PolicyBundle.act_batch`.
        :return: The action by head, and the hidden states `[size]` that follow.
        """
        logits, following = self.outputs({name: array[np.newaxis] for name, array in inputs.items()}, agent_id)
        action = {head: self.heads[head].sampler(values, rng, temperature)[0] for head, values in logits.items()}
        return action, {key: array[0] for key, array in following.items()}

    def ranked(
        self, logits: Mapping[str, Array], row: int, n_best: int, temperature: float
    ) -> list[tuple[dict[str, Any], float]]:
        """Rank the most probable joint actions of all heads, which are independent of one another.

        :param logits: `[batch, ...]` by head.
        :param row: Which row of them.
        :param n_best: Number of actions.
        :param temperature: See :meth:`~maze.serve.bundle.PolicyBundle.act_batch`.
        :raises ConfigError: A head is continuous.
        """
        factors: list[Array] = []
        ends: dict[str, slice] = {}
        for head, values in logits.items():
            probabilities = choice_probabilities(self.heads[head].description, values[row], temperature)
            if not probabilities:
                raise ConfigError(f"Action head `{head}` is continuous: its actions cannot be ranked.")
            ends[head] = slice(len(factors), len(factors) + len(probabilities))
            factors += probabilities
        found = []
        for choices, probability in most_probable(factors, n_best):
            action: dict[str, Any] = {}
            for head, part in ends.items():
                description = self.heads[head].description
                is_single = description["distribution"] == "categorical"
                shape = np.shape(description["nvec"]) if "nvec" in description else tuple(description.get("shape", ()))
                action[head] = np.int64(choices[part][0]) if is_single else np.array(choices[part]).reshape(shape)
            found.append((action, probability))
        return found


def step_of(step: Mapping[str, Any], networks: Sequence[BundledNetwork], shown: Mapping[str, Any]) -> StepSpec:
    """Read a sub-step.

    :param step: Its description in the bundle.
    :param networks: The bundle's networks.
    :param shown: Its description in the bundle's card.
    """
    heads = {
        name: Head(name, head, shown["heads"][name], sampler_of(head), categorical_sizes(head))
        for name, head in step["heads"].items()
    }
    return StepSpec(
        step_key=step["key"],
        n_agents=int(step["n_agents"]),
        observation_space=shown["observation_space"],
        action_space=shown["action_space"],
        observation_kind=step["observation_operations"][0]["kind"],
        action_kind=step["action_operations"][-1]["kind"],
        inputs={name: tuple(int(size) for size in shape) for name, shape in step["inputs"].items()},
        masks=step["masks"],
        heads=heads,
        observation_operations=step["observation_operations"],
        action_operations=step["action_operations"],
        networks={agent: networks[index] for agent, index in step["networks"]},
        where=f"Sub-step {step['key']!r}",
    )


# -- graphs that refer to other files ----------------------------------------------------------------------------------

# Numbers of fields in onnx.proto: what a message may hold that leads to a tensor.
_TENSOR, _EXTERNAL_DATA, _DATA_LOCATION = "tensor", 13, 14
_MESSAGES: Mapping[str, Mapping[int, str]] = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "graph": {1: "node", 5: _TENSOR, 15: "sparse"},
    "function": {7: "node", 11: "attribute"},
    "node": {5: "attribute"},
    "attribute": {5: _TENSOR, 6: "graph", 10: _TENSOR, 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: _TENSOR, 2: _TENSOR},
}
_DEEPEST = 64


def refuse_external_data(content: bytes) -> None:
    """Refuses graphs that have onnxruntime read other files.

    :param content: A serialised `ModelProto`.
    :raises BundleError: A tensor lies in another file, or the bytes are no such message.
    """
    try:
        _walk(memoryview(content), "model", 0)
    except (IndexError, ValueError) as error:
        raise BundleError(f"A network of the bundle is no ONNX graph: {error}.") from error


def _walk(message: memoryview, kind: str, depth: int) -> None:
    if depth > _DEEPEST:
        raise ValueError("it is nested too deeply")
    parts = _MESSAGES.get(kind, {})
    for number, value in _fields(message):
        if kind == _TENSOR:
            if number == _EXTERNAL_DATA or (number == _DATA_LOCATION and value != 0):
                raise BundleError(
                    "A network of the bundle refers to another file (external data). Bundles hold all of their numbers "
                    "themselves; nothing was read."
                )
        elif number in parts and isinstance(value, memoryview):
            _walk(value, parts[number], depth + 1)


def _fields(message: memoryview) -> Iterator[tuple[int, memoryview | int]]:
    """Numbers and values of a protobuf message's fields."""
    place = 0
    while place < len(message):
        key, place = _varint(message, place)
        wire_type = key & 7
        if wire_type == 0:
            value, place = _varint(message, place)
            yield key >> 3, value
            continue
        if wire_type == 2:
            size, place = _varint(message, place)
        elif wire_type in (1, 5):
            size = 8 if wire_type == 1 else 4
        else:
            raise ValueError(f"it has a field of type {wire_type}")
        if place + size > len(message):
            raise ValueError("it ends too early")
        yield key >> 3, message[place : place + size]
        place += size


def _varint(message: memoryview, place: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = message[place]
        place += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, place
    raise ValueError("a number is too long")
