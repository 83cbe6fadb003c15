"""Policy bundles: trained policies in one file, which act with NumPy and onnxruntime alone."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from maze.core.errors import ConfigError, EnvironmentContractError, NonFiniteError, optional_package, unknown_key_error
from maze.core.utils.files import atomic_write
from maze.distributions.numpy_distributions import categorical_sizes, check_logits, ranked_actions, sampler_of
from maze.serve import pipeline
from maze.serve.bundle_file import DESCRIPTION, NEXT_STATE, STATE, Array, BundleError, sha256, unpacked
from maze.serve.drift import checked_summaries

LARGEST_FILE = 2**31
"""Bytes; larger files are refused before they are read."""
_MASKED = float(np.finfo(np.float32).min) / 2  # logits of masked actions are below
# Maximum difference of logits between machines, relative to their size; on one machine it is at most 1e-5.
_TOLERANCE = 1e-4


SMALL_NETWORK = 2**22
"""Bytes of a graph below which one thread is as fast as several."""

SHELF = "shelf:"
"""Prefix of the names of bundles that are part of Maze."""


def shelf() -> dict[str, Path]:
    """Return the files of the bundles that are part of Maze, by name."""
    directory = Path(str(resources.files("maze_envs"))) / "shelf"
    return {path.stem: path for path in sorted(directory.glob("*.maze"))}


def bundle_path(name: str | os.PathLike[str]) -> Path:
    """Return the file of a bundle.

    :param name: Path of the file, or `shelf:<name>`.
    :raises ConfigError: The shelf has no such bundle.
    """
    if not isinstance(name, str) or not name.startswith(SHELF):
        return Path(name)
    short, known = name.removeprefix(SHELF), shelf()
    if short not in known:
        raise unknown_key_error("shelf", short, known)
    return known[short]


class BundledNetwork:
    """An ONNX graph whose inputs are entries of observations and whose outputs are logits.

    The hidden states of a recurrent network are further inputs, and its next hidden states further outputs.

    :param content: The whole graph.
    :param description: `inputs` (names in the graph by entry), `outputs` (names in the graph by head), and of recurrent
        networks `states` (sizes by state key).
    :raises BundleError: onnxruntime cannot read the graph.
    :raises ConfigImportError: onnxruntime is not installed.
    """

    def __init__(self, content: bytes, description: Mapping[str, Any]) -> None:
        onnxruntime = optional_package("onnxruntime", "serve", "Acting needs onnxruntime")
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = 1 if len(content) < SMALL_NETWORK else 0
        options.inter_op_num_threads = 1
        try:
            session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime raises many types
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
            raise BundleError(f"A network and its description do not agree on {sorted(missing)}. Export it again.")

    def __call__(self, batch: Mapping[str, Array]) -> dict[str, Array]:
        """Compute logits `[batch, ...]` by head, and the next hidden states `[batch, size]` by state key.

        :param batch: Arrays of float32 `[batch, ...]` by entry, including hidden states by state key.
        """
        outputs = self._run(self._outputs, {name: batch[entry] for entry, name in self._inputs})
        return dict(zip(self._keys, outputs, strict=True))


class Head:
    """An action head.

    :param description: The distribution as data, see :mod:`maze.distributions.numpy_distributions`.
    """

    def __init__(self, description: Mapping[str, Any]) -> None:
        self.description = description
        self.sampler, self.sizes = sampler_of(description), categorical_sizes(description)


class StepSpec:
    """A sub-step: spaces as JSON, operations, networks and action heads.

    :param step: Its description in the bundle.
    :param networks: The bundle's networks.
    :param shown: Its description in the bundle's card.
    """

    def __init__(self, step: Mapping[str, Any], networks: Sequence[BundledNetwork], shown: Mapping[str, Any]) -> None:
        self.step_key: pipeline.StepKey = step["key"]
        self.where = f"Sub-step {self.step_key!r}"
        """The sub-step in messages."""
        self.observation_space: Mapping[str, Mapping[str, Any]] = shown["observation_space"]
        """Spaces by entry, as the environment converts observations, before all wrappers."""
        self.action_space: Mapping[str, Mapping[str, Any]] = shown["action_space"]
        """Spaces by entry, as the environment takes actions, after all wrappers."""
        entries, *operations = step["observation_operations"]
        self.observation_operations = [{**entries, "space": self.observation_space}, *operations]
        self.action_operations: Sequence[Mapping[str, Any]] = step["action_operations"]
        self.observation_kind: str = entries["kind"]
        """How the raw environment packs observations: `single`, `dict`, `tuple`, or `converted` by its own code."""
        self.action_kind: str = self.action_operations[-1]["kind"]
        """How it packs actions."""
        self.inputs = {name: tuple(int(size) for size in shape) for name, shape in step["inputs"].items()}
        """Shapes of the network inputs, without the batch dimension."""
        self.masks: Mapping[str, str] = step["masks"]
        """The observation entry that masks the actions of a head, by head."""
        self.heads = {name: Head(head) for name, head in step["heads"].items()}
        self.networks: Mapping[int | None, BundledNetwork] = {each: networks[n] for each, n in step["networks"]}
        """Networks by agent; None: the network of all agents."""
        self.n_agents = int(shown["n_agents"])
        """Number of agents in the environment of the training; -1 if it varied."""

    def network(self, agent_id: int = 0) -> BundledNetwork:
        """Return the network of an agent.

        :param agent_id: Number of the agent; irrelevant where all agents share a network.
        :raises ConfigError: Agents have networks of their own, and this one has none.
        """
        network = self.networks.get(None) or self.networks.get(agent_id)
        if network is None:
            raise unknown_key_error(f"{self.where}: agent", agent_id, self.networks)
        return network

    def states_before(
        self, states: Mapping[str, Any] | None, episode_start: Any, n_rows: int, agent_id: int = 0
    ) -> dict[str, Array]:
        """Return the hidden states before a step, `[n_rows, size]` by state key; empty where the network carries none.

        :param states: See :meth:`PolicyBundle.act_batch`.
        :param episode_start: See :meth:`PolicyBundle.act_batch`.
        :param n_rows: Number of rows.
        :param agent_id: The agent.
        :raises ConfigError: States are missing, or have other names or shapes.
        :raises NonFiniteError: States are not finite.
        """
        sizes = self.network(agent_id).state_sizes
        if unknown := [key for key in states or {} if key not in sizes]:
            known = list(sizes) or "no hidden states"
            raise ConfigError(f"{self.where}: the network carries {known}, found `states` {unknown}.")
        if not sizes:
            return {}
        begins = np.asarray(False if episode_start is None else episode_start)
        if begins.dtype != np.bool_ or begins.shape not in {(), (n_rows,)}:
            expected = f"must hold true or false for {n_rows} rows"
            raise ConfigError(f"{self.where}: `episode_start` {expected}, found {episode_start!r}.")
        if not states:
            if not begins.all():
                raise ConfigError(
                    f"{self.where}: the policy carries hidden states from step to step, and none were passed. Pass the "
                    "`states` of the previous answer, and `episode_start=True` where an episode begins."
                )
            return {key: np.zeros((n_rows, size), np.float32) for key, size in sizes.items()}
        before = {}
        for key, size in sizes.items():
            place = f"{self.where}: `states[{key!r}]`"
            try:
                with np.errstate(over="ignore"):
                    array = np.array(states[key], np.float32)
            except (KeyError, ValueError, TypeError) as error:
                raise ConfigError(f"{place} is missing or has no numbers ({type(error).__name__}).") from error
            if array.shape != (n_rows, size):
                raise ConfigError(f"{place} has the shape {list(array.shape)}, expected {[n_rows, size]}.")
            array[np.broadcast_to(begins, n_rows)] = 0.0
            if not np.isfinite(array).all():
                raise NonFiniteError(f"{place} is not finite.")
            before[key] = array
        return before

    def inputs_of(self, entries: Mapping[str, Any], is_batch: bool = False) -> dict[str, Array]:
        """Return the entries that the networks take, as arrays of float32.

        :param entries: Arrays or lists of numbers by name; further entries are ignored.
        :param is_batch: Whether each entry is `[batch, *shape]`, otherwise `[*shape]`.
        :return: Arrays in these shapes, by name.
        :raises EnvironmentContractError: An entry is missing, is not numeric or has another shape, or the batch is
            empty.
        """
        inputs: dict[str, Array] = {}
        first: tuple[int, ...] = ()
        for name, shape in self.inputs.items():
            try:
                array = np.asarray(entries[name], np.float32)
            except (KeyError, ValueError, TypeError) as error:
                found = f"is missing or has no numbers ({type(error).__name__}), there is {list(entries)!s:.200}"
                raise EnvironmentContractError(f"{self.where}: the input `{name}` {found}.") from error
            if is_batch:
                first = first or array.shape[:1]
            if array.shape != (*first, *shape) or (is_batch and first in {(), (0,)}):
                shapes = f"{['batch', *shape] if is_batch else list(shape)}, found {list(array.shape)}"
                raise EnvironmentContractError(f"{self.where}: the network takes `{name}` of shape {shapes}.")
            inputs[name] = array
        return inputs

    def outputs(self, batch: Mapping[str, Array], agent_id: int = 0) -> tuple[dict[str, Array], dict[str, Array]]:
        """Compute checked logits `[batch, ...]` by head, and the next hidden states `[batch, size]` by state key.

        :param batch: Network inputs `[batch, ...]` by entry, including hidden states by state key.
        :param agent_id: The agent.
        :raises NonFiniteError: A logit is NaN or infinite.
        :raises EnvironmentContractError: All actions of a row are masked.
        """
        network = self.network(agent_id)
        logits = network(batch)
        following = {key: logits.pop(key) for key in network.state_sizes} if network.state_sizes else {}
        for head, values in logits.items():
            check_logits(values, self.heads[head].sizes, head, self.where)
        return logits, following

    def chosen(
        self, logits: Mapping[str, Array], rng: np.random.Generator | None, temperature: float
    ) -> dict[str, Array]:
        """Choose the actions.

        :param logits: `[batch, ...]` by head.
        :param rng: Generator of sampled actions; `None`: greedy actions.
        :param temperature: See :meth:`PolicyBundle.act_batch`.
        :return: `[batch, *space.shape]` by head.
        """
        return {head: self.heads[head].sampler(values, rng, temperature) for head, values in logits.items()}


class BatchActions(NamedTuple):
    """Actions for a batch.

    :param actions: `[batch, *space.shape]` by head.
    :param logits: `[batch, ...]` by head.
    :param ranked: For each row the most probable joint actions with their probabilities, best first; empty if not
        requested.
    :param states: The next hidden states `[batch, size]` by state key; empty where none are carried.
    """

    actions: dict[str, Array]
    logits: dict[str, Array]
    ranked: list[list[tuple[dict[str, Any], float]]]
    states: dict[str, Array]

    def row(self, index: int) -> dict[str, Any]:
        """Return one row's action, as :meth:`PolicySession.finish` takes it."""
        return {head: array[index] for head, array in self.actions.items()}

    def states_of(self, index: int) -> dict[str, Array]:
        """Return one row's hidden states `[size]`, as :attr:`PolicySession.states` takes them."""
        return {key: array[index] for key, array in self.states.items()}


class PolicyBundle:
    """A trained policy: networks, pre-processing, spaces, distributions, and its card.

    >>> bundle = PolicyBundle.load("policy.maze")  # doctest: +SKIP
    >>> session = bundle.session(seed=1)  # doctest: +SKIP
    >>> action = session.act(observation)  # doctest: +SKIP

    :param content: All bytes of the file.
    :param path: The file, if there is one.
    :param check: Whether to replay the reference cases; a number is the tolerance.
    :raises BundleError: The file is damaged, no bundle, or does not act as the trained policy.
    """

    def __init__(self, content: bytes, path: Path | None = None, check: bool | float = True) -> None:
        name = str(path) if path is not None else "The bundle"
        description, members = unpacked(content, name)
        self.path = path
        self.sha256 = sha256(content)
        """SHA-256 sum of the whole file."""
        self._content = content
        try:
            self.card: Mapping[str, Any] = description["card"]
            """Name, versions, environment, algorithm, evaluation, spaces, and code of the caller, as JSON."""
            networks = [BundledNetwork(members[network["file"]], network) for network in description["networks"]]
            self.steps: Mapping[pipeline.StepKey, StepSpec] = {
                step["key"]: StepSpec(step, networks, self.card["steps"][index])
                for index, step in enumerate(description["steps"])
            }
            """Sub-steps by their keys."""
            self.is_recurrent = any(network.state_sizes for network in networks)
            """Whether hidden states are carried from step to step of an episode."""
            of_steps = [(*step.observation_operations, *step.action_operations) for step in self.steps.values()]
            operations = {str(each["op"]) for of_step in of_steps for each in of_step}
            self.has_memory = not operations.isdisjoint(("stack", "skip"))
            """Whether observations of an episode are needed one by one, to stack them or to repeat actions."""
            self.repeats_actions = "skip" in operations
            """Whether actions are repeated for several steps."""
            self.actor_sequence: list[pipeline.Actor] = [
                (actor[0], int(actor[1])) for actor in description["actor_sequence"]
            ]
            """The actors of a step in their order; empty where it is not fixed."""
            self.drift: Mapping[pipeline.StepKey, Mapping[str, Any]] = {
                step["key"]: checked_summaries(step["drift"], self.steps[step["key"]].observation_space, name)
                for step in description["steps"]
            }
            """Summaries of the training's observations by sub-step and entry, see :mod:`maze.serve.drift`."""
            self.reference: Sequence[Mapping[str, Any]] = description["reference"]
            """Observations with the logits and actions of the trained policy."""
            self.episode: Sequence[Mapping[str, Any]] = description["episode"]
            """The beginning of an episode: observations of the raw environment and network inputs; may be empty."""
            if check is not False:
                replay_reference(self, _TOLERANCE if check is True else check)
        except BundleError:
            raise
        except Exception as error:  # a description may hold anything
            raise BundleError(f"{name}: {DESCRIPTION} cannot be read: {error!r}.") from error

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, check: bool = True) -> PolicyBundle:
        """Read a bundle, compare all checksums, and replay its reference cases.

        Only its networks are executed, and nothing is written.

        :param path: The file, or `shelf:<name>`.
        :param check: Whether to replay the reference cases.
        :raises BundleError: The file cannot be read, or differs from what was exported.
        """
        path = bundle_path(path)
        try:
            size = path.stat().st_size
            if size > LARGEST_FILE:
                raise BundleError(f"{path} has {size} bytes; a bundle has at most {LARGEST_FILE}.")
            content = path.read_bytes()
        except OSError as error:
            raise BundleError(f"{path} cannot be read: {error.strerror or error}.") from error
        return cls(content, path, check)

    @classmethod
    def from_run(cls, run_dir: str | os.PathLike[str], **settings: Any) -> PolicyBundle:
        """Export the policy of a training run; needs torch, onnx and onnxscript.

        :param run_dir: Directory of the run.
        :param settings: Arguments of :func:`maze.serve.export.export_run`.
        """
        from maze.serve.export import EXACT, export_run

        return cls(export_run(Path(run_dir), **settings), check=EXACT)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the file atomically.

        :param path: The file, which becomes :attr:`path`.
        :return: The path.
        """
        target = Path(path)
        atomic_write(target, lambda file: file.write(self._content))
        self.path = target
        return target

    def session(self, seed: int | None = None, provided: pipeline.Provided | None = None) -> PolicySession:
        """Begin a session, which acts on the observations of one environment.

        :param seed: Seed of sampled actions; `None`: unpredictable.
        :param provided: The caller's code that the card lists, by its name there.
        :raises BundleError: Required code is missing, or provided code is unknown.
        """
        return PolicySession(self, seed, provided)

    def step(self, step_key: pipeline.StepKey) -> StepSpec:
        """Return a sub-step.

        :param step_key: Its key.
        :raises ConfigError: There is no such sub-step.
        """
        step = self.steps.get(step_key)
        if step is None:
            raise unknown_key_error("The policy's sub-step", step_key, self.steps)
        return step

    def act_batch(
        self,
        step_key: pipeline.StepKey,
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
        """Act on a batch of network inputs, without a session.

        The caller of a recurrent policy carries its hidden states: each row is a step of another episode, and is passed
        the states of the previous answer.

        >>> states = None  # doctest: +SKIP
        >>> answer = bundle.act_batch(0, observations, states=states, episode_start=begins)  # doctest: +SKIP
        >>> states = answer.states  # doctest: +SKIP

        :param step_key: The sub-step.
        :param observations: Arrays `[batch, *shape]` by name, see `StepSpec.inputs`.
        :param agent_id: The agent; relevant where agents have separate networks.
        :param deterministic: Choose greedy actions instead of sampled ones.
        :param rngs: Generators of sampled actions: one for each row, or one for all.
        :param ranked: Number of most probable joint actions to return for each row, with their probabilities.
        :param temperature: Below 1 sharpens the distributions of sampled and ranked actions, above 1 flattens them.
        :param states: Hidden states `[batch, size]` by state key, of the previous answer; None: there are none yet.
        :param episode_start: Whether an episode begins, bool `[batch]` or one for all; hidden states are zero then,
            whatever `states` holds.
        :raises EnvironmentContractError: An observation has another shape than in training, or all actions are masked.
        :raises NonFiniteError: A logit or a hidden state is not finite.
        :raises ConfigError: Ranked actions of a continuous head are requested, generators are missing, hidden states
            are missing or have another shape, or there is no such sub-step or agent.
        """
        step = self.step(step_key)
        batch = step.inputs_of(observations, is_batch=True)
        batch |= step.states_before(states, episode_start, len(next(iter(batch.values()))), agent_id)
        logits, following = step.outputs(batch, agent_id)
        generators = None if deterministic else (rngs if rngs is not None else np.random.default_rng())
        n_rows = len(next(iter(logits.values())))
        if generators is None or isinstance(generators, np.random.Generator):
            actions = step.chosen(logits, generators, temperature)
        else:
            if len(generators) != n_rows:
                raise ConfigError(f"act_batch: {n_rows} rows need as many generators, found {len(generators)}.")
            parts = ({head: values[index : index + 1] for head, values in logits.items()} for index in range(n_rows))
            rows = [step.chosen(part, rng, temperature) for part, rng in zip(parts, generators, strict=True)]
            actions = {head: np.concatenate([row[head] for row in rows]) for head in logits}
        heads = {name: head.description for name, head in step.heads.items()}
        of_rows = ({head: values[index] for head, values in logits.items()} for index in range(n_rows if ranked else 0))
        best = [ranked_actions(heads, of_row, ranked, temperature) for of_row in of_rows]
        return BatchActions(actions, logits, best, following)


class PolicySession:
    """Act in the raw environment, episode after episode: stacks observations, tracks the actor, samples actions.

    :meth:`act` suffices for one session. To act for several sessions at once, call :meth:`prepare` of each,
    :meth:`PolicyBundle.act_batch` once with the stacked inputs, and :meth:`finish` of each. For recurrent policies,
    pass the stacked :attr:`states`, and assign the states of the answer. A session belongs to one thread at a time.

    :param bundle: The policy.
    :param seed: Seed of sampled actions; None: unpredictable. A
        :class:`~maze.core.agent.torch_policy.TorchPolicy` with this seed samples the same actions.
    :param provided: The caller's code that the card lists, by its name there.
    :raises BundleError: Required code is missing, or provided code is unknown.
    """

    def __init__(self, bundle: PolicyBundle, seed: int | None, provided: pipeline.Provided | None) -> None:
        provided = dict(provided or {})
        pipeline.check_provided(bundle.card["code"], provided)
        self.bundle = bundle
        self.rng = seeded_generator(seed)
        """Samples actions; a server passes it to `act_batch`."""
        self.converted: Mapping[str, Any] = {}
        """Entries of the latest observation, before any wrapper."""
        self._observation_stages, self._action_stages = {}, {}
        for key, step in bundle.steps.items():
            first, *others = pipeline.stages_of(pipeline.OBSERVATION_STAGES, step.observation_operations, provided)
            self._observation_stages[key] = (first, others)
            self._action_stages[key] = pipeline.stages_of(pipeline.ACTION_STAGES, step.action_operations, provided)
        self._state = pipeline.EpisodeState()
        self._sequence = bundle.actor_sequence
        self._n_prepared = 0
        self._actor: pipeline.Actor = self._sequence[0] if self._sequence else (next(iter(bundle.steps)), 0)

    def reset(self, seed: int | None = None) -> None:
        """Begin another episode.

        :param seed: Seed of a new generator; None: the present generator continues.
        """
        self._state = pipeline.EpisodeState()
        self._n_prepared = 0
        if seed is not None:
            self.rng = seeded_generator(seed)

    def act(
        self,
        observation: Any,
        actor_id: pipeline.Actor | None = None,
        *,
        deterministic: bool = True,
        temperature: float = 1.0,
        is_packed: bool = True,
    ) -> Any:
        """Choose the action for the next observation of the raw environment.

        :param observation: Observation of the raw environment. Where the environment's own code converts its states,
            and the caller has not provided it: a mapping of the entries that the conversion returns.
        :param actor_id: The actor: step key and number of the agent. By default the next one in the fixed order.
        :param deterministic: Choose the greedy action instead of a sampled one.
        :param temperature: Below 1 sharpens the distribution of sampled actions, above 1 flattens it.
        :param is_packed: Return the action as the raw environment takes it; otherwise by entry, as Maze environments
            take it.
        :return: The action; a mapping of its entries where the environment's own code converts them, and the caller has
            not provided it.
        :raises EnvironmentContractError: The observation has another shape or type than in training or a choice that
            its space lacks, or all actions are masked.
        :raises NonFiniteError: The observation or a logit is not finite.
        """
        inputs = self.prepare(observation, actor_id)
        action = None
        if inputs is not None:
            step_key, agent_id = self._actor
            rng = None if deterministic else self.rng
            if self.bundle.is_recurrent:
                inputs |= self.states
            step = self.bundle.steps[step_key]
            logits, following = step.outputs({name: array[np.newaxis] for name, array in inputs.items()}, agent_id)
            action = {head: values[0] for head, values in step.chosen(logits, rng, temperature).items()}
            if following:
                self.states = {key: array[0] for key, array in following.items()}
        return self.finish(action, is_packed)

    @property
    def states(self) -> dict[str, Array]:
        """Hidden states `[size]` of the latest actor by state key; zero where an episode begins, empty where its
        network carries none. The next hidden states are assigned after a decision."""
        if not self.bundle.is_recurrent:
            return {}
        states = self._state.states.get(self._actor)
        if states is None:
            step_key, agent_id = self._actor
            sizes = self.bundle.steps[step_key].network(agent_id).state_sizes
            states = {key: np.zeros(size, np.float32) for key, size in sizes.items()}
        return states

    @states.setter
    def states(self, states: dict[str, Array]) -> None:
        self._state.states[self._actor] = states

    def prepare(self, observation: Any, actor_id: pipeline.Actor | None = None) -> dict[str, Array] | None:
        """Compute the network inputs of the acting actor, float32 `[*shape]` by name, without a batch dimension.

        :param observation: See :meth:`act`.
        :param actor_id: See :meth:`act`.
        :return: The decision; `None` where the last action is repeated, call :meth:`finish` with None then.
        """
        if actor_id is not None:
            actor = (actor_id[0], int(actor_id[1]))
        elif self._sequence:
            actor = self._sequence[self._n_prepared % len(self._sequence)]
        else:
            known = list(self.bundle.steps)
            raise EnvironmentContractError(f"The order of actors varies: pass actor_id=(step key, agent), of {known}.")
        step = self.bundle.step(actor[0])
        first, others = self._observation_stages[actor[0]]
        entries = self.converted = first(observation, self._state, actor)
        if others:
            entries = dict(entries)  # stages modify it
            for stage in others:
                entries = stage(entries, self._state, actor)
                if entries is None:
                    break
        self._actor = actor
        self._n_prepared += 1
        return None if entries is None else step.inputs_of(entries)

    def finish(self, action: Mapping[str, Any] | None, is_packed: bool = True) -> Any:
        """Convert the chosen action to one of the raw environment.

        :param action: `[*space.shape]` by head, a row of :meth:`PolicyBundle.act_batch`; None where :meth:`prepare`
            returned None.
        :param is_packed: See :meth:`act`.
        :raises EnvironmentContractError: There is no action, and none to be repeated.
        """
        result: Any = action
        stages = self._action_stages[self._actor[0]]
        for stage in stages if is_packed else stages[:-1]:
            if result is None and not self._state.is_repeating:
                raise EnvironmentContractError("finish: expected an action, found None, which repeats the last action.")
            result = stage(result, self._state, self._actor)
        return result


def seeded_generator(seed: int | None) -> np.random.Generator:
    """Return the generator of sampled actions of a torch policy with this seed."""
    rng = np.random.Generator(np.random.PCG64(seed))
    rng.integers(2**63)  # the torch policy seeds its torch generator with it
    return rng


def replay_reference(bundle: PolicyBundle, tolerance: float) -> None:
    """Compare a bundle with the recorded trained policy.

    :param bundle: The bundle.
    :param tolerance: Maximum difference of logits, relative to the largest of them.
    :raises BundleError: The bundle differs from the trained policy.
    """
    for case in bundle.reference:
        step = bundle.step(case["step_key"])
        states = case.get("states")
        answer = bundle.act_batch(step.step_key, case["inputs"], agent_id=case["agent_id"], states=states)
        for key, expected in case.get("next_states", {}).items():
            _require_close(answer.states[key], expected, tolerance, f"{step.where}, hidden state `{key}`")
        for head, expected in case["logits"].items():
            _require_close(answer.logits[head], expected, tolerance, f"{step.where}, logits of head `{head}`")
            actions = step.heads[head].sampler(expected, None, 1.0)
            _require_close(actions, case["actions"][head], 1e-5, f"{step.where}, actions of head `{head}`")
    if not bundle.episode:
        return
    session = bundle.session()
    for case in bundle.episode:
        step, agent_id = bundle.step(case["actor"][0]), case["actor"][1]
        observation = pipeline.packed(case["observation"], step.observation_kind)
        inputs = session.prepare(observation, (step.step_key, agent_id))
        for name, found in (inputs or {}).items():
            _require_close(found, case["inputs"][name], 1e-5, f"{step.where}, network input `{name}`")


def _require_close(found: Any, expected: Any, tolerance: float, what: str) -> None:
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    masked = expected <= _MASKED
    limit = tolerance * max(1.0, float(np.abs(expected[~masked]).max(initial=0.0)))
    error = float(np.abs(found[~masked] - expected[~masked]).max(initial=0.0))
    if not error <= limit or (found[masked] > _MASKED).any():
        difference = f"the largest difference is {error:.3g}, at most {limit:.3g} is rounding"
        raise BundleError(f"The bundle differs from the trained policy: {what}: {difference}.")
