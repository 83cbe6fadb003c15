"""A trained policy in one file that acts with NumPy and onnxruntime alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from maze.core.errors import ConfigError, EnvironmentContractError, NonFiniteError, unknown_key_error
from maze.core.utils.files import atomic_write
from maze.distributions.samplers import (
    Sampler,
    categorical_sizes,
    check_logits,
    choice_probabilities,
    most_probable,
    sampler_of,
)
from maze.serve.archive import ARRAYS, DESCRIPTION, BundleError, parsed_json, sha256, unpacked
from maze.serve.networks import BundledNetwork
from maze.serve.pipeline import Actor, StepKey
from maze.serve.session import PolicySession
from maze.serve.stored import loaded

Array = np.ndarray[Any, Any]
LARGEST_FILE = 2**31
"""Bytes; larger files are refused before they are read."""
_TOLERANCE = 1e-4
"""By how much logits may differ between machines, relative to their size; on one machine it is 1e-5 at most."""


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


class BatchActions(NamedTuple):
    """What networks have chosen for a batch."""

    actions: dict[str, Array]
    """`[batch, *space.shape]` by head."""
    logits: dict[str, Array]
    """`[batch, ...]` by head."""
    ranked: list[list[tuple[dict[str, Any], float]]]
    """For each row the most probable joint actions with their probabilities, best first; empty if none were
    asked for."""
    states: dict[str, Array]
    """The hidden states that follow, `[batch, size]` by state key; empty where none are carried."""

    def row(self, index: int) -> dict[str, Any]:
        """One row's action, as :meth:`~maze.serve.session.PolicySession.finish` takes it."""
        return {head: array[index] for head, array in self.actions.items()}

    def states_of(self, index: int) -> dict[str, Array]:
        """One row's hidden states `[size]`, as :attr:`~maze.serve.session.PolicySession.states` takes them."""
        return {key: array[index] for key, array in self.states.items()}


class PolicyBundle:
    """A policy with everything that belongs to it: networks, pre-processing, spaces, distributions, and its card.

    >>> bundle = PolicyBundle.load("policy.maze")  # doctest: +SKIP
    >>> session = bundle.session(seed=1)  # doctest: +SKIP
    >>> action = session.act(observation)  # doctest: +SKIP

    :param content: All bytes of the file.
    :param path: Where it lies, if it does.
    :param check: Whether the reference cases are replayed, with this tolerance if it is a number.
    :param n_threads: Threads of each network; None: one for small networks, else as many as there are cores.
    :raises BundleError: It is damaged, no bundle, or does not act as it should.
    """

    def __init__(
        self, content: bytes, path: Path | None = None, check: bool | float = True, n_threads: int | None = None
    ) -> None:
        name = str(path) if path is not None else "The bundle"
        members = unpacked(content, name)
        self.path = path
        self.sha256 = sha256(content)
        """Of the whole file."""
        self._content = content
        arrays = members.get(ARRAYS, b"")
        try:
            description = loaded(parsed_json(members.get(DESCRIPTION, b"null"), f"{name}: {DESCRIPTION}"), arrays)
            self.card: Mapping[str, Any] = description["card"]
            """What a person, or a page, wants to know: name, versions, environment, algorithm, evaluation, spaces, code
            that the caller provides. All of it is JSON."""
            networks = [
                BundledNetwork(members[network["file"]], network, n_threads) for network in description["networks"]
            ]
            self.steps: Mapping[StepKey, StepSpec] = {
                step["key"]: _step(step, networks, self.card["steps"][index])
                for index, step in enumerate(description["steps"])
            }
            """The sub-steps by their keys."""
            self.is_recurrent = any(network.state_sizes for network in networks)
            """Whether hidden states are carried from step to step of an episode."""
            self.actor_sequence: list[Actor] = [(actor[0], int(actor[1])) for actor in description["actor_sequence"]]
            """Who acts, one after the other, where their order is fixed; else empty."""
            self.drift: Mapping[StepKey, Mapping[str, Any]] = {
                step["key"]: step["drift"] for step in description["steps"]
            }
            """By sub-step and entry of the observation: what training observations look like, see
            :mod:`maze.serve.drift`."""
            self.reference: Sequence[Mapping[str, Any]] = description["reference"]
            """Observations with the logits and actions of the trained policy."""
            self.episode: Sequence[Mapping[str, Any]] = description["episode"]
            """The beginning of an episode in the raw environment, with the most probable actions; may be empty."""
            if check is not False:
                replay_reference(self, _TOLERANCE if check is True else check)
        except BundleError:
            raise
        except Exception as error:  # a description may hold anything, and may claim anything
            raise BundleError(f"{name}: {DESCRIPTION} cannot be read: {error!r}.") from error

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, check: bool = True, n_threads: int | None = None) -> PolicyBundle:
        """Reads a bundle, compares all of its sums, and replays its reference cases. Nothing in it is executed but
        its networks, and nothing is written.

        :param path: The file.
        :param check: Whether the reference cases are replayed.
        :param n_threads: See the class.
        :raises BundleError: There is no such file, or it is not what was exported.
        """
        path = Path(path)
        try:
            size = path.stat().st_size
            if size > LARGEST_FILE:
                raise BundleError(f"{path} has {size} bytes; a bundle has at most {LARGEST_FILE}.")
            content = path.read_bytes()
        except OSError as error:
            raise BundleError(f"{path} cannot be read: {error.strerror or error}.") from error
        return cls(content, path, check, n_threads)

    @classmethod
    def from_run(cls, run_dir: str | os.PathLike[str], **settings: Any) -> PolicyBundle:
        """The policy that a training run has left behind; this needs torch, onnx and onnxscript.

        :param run_dir: Directory of the run.
        :param settings: Those of :func:`maze.serve.export.export_run`.
        """
        from maze.serve.export import EXACT, export_run

        return cls(export_run(Path(run_dir), **settings), check=EXACT)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes the file, whole or not at all.

        :param path: Where to.
        """
        target = Path(path)
        atomic_write(target, lambda file: file.write(self._content))
        self.path = target
        return target

    def session(
        self, seed: int | None = None, provided: Mapping[str, Callable[..., Any]] | None = None
    ) -> PolicySession:
        """Begins to act for one stream of observations.

        The arguments are those of :class:`~maze.serve.session.PolicySession`.
        """
        return PolicySession(self, seed, provided)

    def step(self, step_key: StepKey) -> StepSpec:
        """A sub-step.

        :raises ConfigError: There is no such sub-step.
        """
        step = self.steps.get(step_key)
        if step is None:
            raise unknown_key_error("The policy's sub-step", step_key, self.steps)
        return step

    def act_batch(
        self,
        step_key: StepKey,
        observations: Mapping[str, Any],
        *,
        agent_id: int = 0,
        deterministic: bool = True,
        rngs: Sequence[np.random.Generator] | np.random.Generator | None = None,
        ranked: int = 0,
        temperature: float = 1.0,
        states: Mapping[str, Any] | None = None,
        episode_start: Any = None,
    ) -> BatchActions:
        """Acts on what networks take, for any number of observations at once; nothing is remembered.

        The caller of a recurrent policy carries its hidden states: each row is a step of another episode, and goes on
        with the states that came with the answer to the step before.

        >>> states = None  # doctest: +SKIP
        >>> answer = bundle.act_batch(0, observations, states=states, episode_start=begins)  # doctest: +SKIP
        >>> states = answer.states  # doctest: +SKIP

        :param step_key: The sub-step.
        :param observations: Arrays `[batch, *shape]` by name, see `StepSpec.inputs`.
        :param agent_id: The agent; matters where agents have networks of their own.
        :param deterministic: Take the most probable actions instead of drawing them.
        :param rngs: What sampled actions are drawn from: a generator for each row, or one for all.
        :param ranked: So many of the most probable joint actions are given with their probabilities, for each row.
        :param temperature: Below 1 sharpens the distributions that are drawn from and ranked by, above 1 flattens them.
        :param states: Hidden states `[batch, size]` by state key: those of the answer before. None where no row has any
            yet.
        :param episode_start: Where episodes begin, bool `[batch]` or one for all: there hidden states are zero,
            whatever `states` says.
        :raises EnvironmentContractError: An observation has another shape than in training, or all actions are masked.
        :raises NonFiniteError: A logit or a hidden state is not finite.
        :raises ConfigError: Ranked actions of a continuous head are asked for, generators are missing, hidden states
            are missing or have another shape, or there is no such sub-step or agent.
        """
        step = self.step(step_key)
        batch = _batch(step, observations)
        network = step.network(agent_id)
        if states or network.state_sizes:
            batch |= step.states_before(states, episode_start, len(next(iter(batch.values()))), agent_id)
        logits, following = _outputs(step, network, batch)
        generators = None if deterministic else (rngs if rngs is not None else np.random.default_rng())
        n_rows = len(next(iter(logits.values())))
        if generators is None or isinstance(generators, np.random.Generator):
            actions = {
                head: step.heads[head].sampler(values, generators, temperature) for head, values in logits.items()
            }
        else:
            if len(generators) != n_rows:
                raise ConfigError(f"act_batch: {n_rows} rows need as many generators, got {len(generators)}.")
            rows = [
                [
                    step.heads[head].sampler(values[index : index + 1], rng, temperature)
                    for head, values in logits.items()
                ]
                for index, rng in enumerate(generators)
            ]
            actions = {head: np.concatenate([row[index] for row in rows]) for index, head in enumerate(logits)}
        best = [_ranked(step, logits, index, ranked, temperature) for index in range(n_rows)] if ranked else []
        return BatchActions(actions, logits, best, following)

    def _act_one(
        self,
        step_key: StepKey,
        agent_id: int,
        inputs: Mapping[str, Array],
        rng: np.random.Generator | None,
        temperature: float,
    ) -> tuple[dict[str, Any], dict[str, Array]]:
        """The same for one observation of a session, `[*shape]` by name, with as little around it as can be; hidden
        states `[size]` are among the inputs. The action, and the states that follow, `[1, size]`."""
        step = self.steps[step_key]
        batch = {name: array[np.newaxis] for name, array in inputs.items()}
        logits, following = _outputs(step, step.network(agent_id), batch)
        action = {head: step.heads[head].sampler(values, rng, temperature)[0] for head, values in logits.items()}
        return action, following


def _outputs(
    step: StepSpec, network: BundledNetwork, batch: Mapping[str, Array]
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Logits by head, and the hidden states that follow by state key."""
    logits = network(batch)
    following = {key: logits.pop(key) for key in network.state_sizes} if network.state_sizes else {}
    for head, values in logits.items():
        check_logits(values, step.heads[head].sizes, head, step.where)
    return logits, following


def replay_reference(bundle: PolicyBundle, tolerance: float) -> None:
    """Compares what a bundle does with what the trained policy did.

    :param bundle: The bundle.
    :param tolerance: By how much logits may differ, relative to the largest among them.
    :raises BundleError: It does something else.
    """
    for case in bundle.reference:
        answer = bundle.act_batch(
            case["step_key"], case["inputs"], agent_id=case["agent_id"], states=case.get("states")
        )
        for key, expected in case.get("next_states", {}).items():
            error = float(np.abs(answer.states[key] - expected).max(initial=0.0))
            if not error <= tolerance * max(1.0, float(np.abs(expected).max(initial=0.0))):
                raise BundleError(
                    f"The bundle does not remember as the trained policy: sub-step {case['step_key']!r}, hidden state "
                    f"`{key}` differs by {error:.3g}. Export the policy again."
                )
        for head, expected in case["logits"].items():
            found, masked = answer.logits[head], expected <= np.finfo(np.float32).min / 2
            limit = tolerance * max(1.0, float(np.abs(expected[~masked]).max(initial=0.0)))
            error = float(np.abs(found[~masked] - expected[~masked]).max(initial=0.0))
            if not error <= limit or (found[masked] > np.finfo(np.float32).min / 2).any():
                raise BundleError(
                    f"The bundle does not act as the trained policy: sub-step {case['step_key']!r}, head `{head}`: "
                    f"logits differ by {error:.3g}, at most {limit:.3g} is rounding. Export the policy again."
                )
            again = bundle.step(case["step_key"]).heads[head].sampler(expected, None, 1.0)
            wanted = case["actions"][head]
            if not np.allclose(again, wanted, rtol=1e-5, atol=1e-5):
                raise BundleError(
                    f"The bundle does not act as the trained policy: sub-step {case['step_key']!r}, head `{head}`: "
                    f"the actions for the same logits differ."
                )

    session = bundle.session() if bundle.episode else None
    for case in bundle.episode:
        assert session is not None, "there is an episode"
        actor = (case["actor"][0], case["actor"][1])
        kind = bundle.step(actor[0]).observation_kind
        values = list(case["observation"].values())
        shown: Any = values[0] if kind == "single" else tuple(values) if kind == "tuple" else case["observation"]
        inputs = session.prepare(shown, actor)
        for name, found in (inputs or {}).items():
            if not np.allclose(found, case["inputs"][name], rtol=1e-5, atol=1e-6):
                raise BundleError(
                    f"The bundle does not observe as the trained policy: sub-step {actor[0]!r}: `{name}` differs from "
                    "what the network got in training. Export the policy again."
                )


def _batch(step: StepSpec, observations: Mapping[str, Any]) -> dict[str, Array]:
    batch: dict[str, Array] = {}
    n_rows = None
    for name, shape in step.inputs.items():
        try:
            array = np.asarray(observations[name], np.float32)
        except (KeyError, ValueError, TypeError) as error:
            raise EnvironmentContractError(
                f"Sub-step {step.step_key!r}: the network takes {list(step.inputs)}; `{name}` is missing or has no "
                f"numbers ({type(error).__name__})."
            ) from error
        n_rows = len(array) if n_rows is None and array.ndim else n_rows
        if array.ndim == 0 or array.shape != (n_rows, *shape) or n_rows == 0:
            raise EnvironmentContractError(
                f"Sub-step {step.step_key!r}: the network takes `{name}` of shape {['batch', *shape]}, "
                f"found {list(array.shape)}."
            )
        batch[name] = array
    return batch


def _ranked(
    step: StepSpec, logits: Mapping[str, Array], row: int, n_best: int, temperature: float
) -> list[tuple[dict[str, Any], float]]:
    """The most probable joint actions of all heads, which are independent of one another."""
    factors: list[Array] = []
    ends: dict[str, slice] = {}
    for head, values in logits.items():
        probabilities = choice_probabilities(step.heads[head].description, values[row], temperature)
        if not probabilities:
            raise ConfigError(f"Action head `{head}` is continuous: its actions cannot be ranked.")
        ends[head] = slice(len(factors), len(factors) + len(probabilities))
        factors += probabilities
    found = []
    for choices, probability in most_probable(factors, n_best):
        action: dict[str, Any] = {}
        for head, part in ends.items():
            description = step.heads[head].description
            is_single = description["distribution"] == "categorical"
            shape = np.shape(description["nvec"]) if "nvec" in description else tuple(description.get("shape", ()))
            action[head] = np.int64(choices[part][0]) if is_single else np.array(choices[part]).reshape(shape)
        found.append((action, probability))
    return found


def _step(step: Mapping[str, Any], networks: Sequence[BundledNetwork], shown: Mapping[str, Any]) -> StepSpec:
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
