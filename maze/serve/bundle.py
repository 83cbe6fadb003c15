"""A trained policy in one file that acts with NumPy and onnxruntime alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from maze.core.errors import ConfigError, EnvironmentContractError, unknown_key_error
from maze.core.utils.files import atomic_write
from maze.serve.bundle_file import ARRAYS, DESCRIPTION, BundleError, loaded, parsed_json, sha256, unpacked
from maze.serve.drift import checked_summaries
from maze.serve.pipeline import Actor, Memory, StepKey, action_stages, check_provided, observation_stages
from maze.serve.steps import BundledNetwork, StepSpec, step_of

Array = np.ndarray[Any, Any]
LARGEST_FILE = 2**31
"""Bytes; larger files are refused before they are read."""
_TOLERANCE = 1e-4
"""By how much logits may differ between machines, relative to their size; on one machine it is 1e-5 at most."""


class BatchActions(NamedTuple):
    """What networks have chosen for a batch."""

    actions: dict[str, Array]
    """`[batch, *space.shape]` by head."""
    logits: dict[str, Array]
    """`[batch, ...]` by head."""
    ranked: list[list[tuple[dict[str, Any], float]]]
    """For each row the most probable joint actions with their probabilities, best first; empty if none were
    requested."""
    states: dict[str, Array]
    """The hidden states that follow, `[batch, size]` by state key; empty where none are carried."""

    def row(self, index: int) -> dict[str, Any]:
        """One row's action, as :meth:`PolicySession.finish` takes it."""
        return {head: array[index] for head, array in self.actions.items()}

    def states_of(self, index: int) -> dict[str, Array]:
        """One row's hidden states `[size]`, as :attr:`PolicySession.states` takes them."""
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
                step["key"]: step_of(step, networks, self.card["steps"][index])
                for index, step in enumerate(description["steps"])
            }
            """The sub-steps by their keys."""
            self.is_recurrent = any(network.state_sizes for network in networks)
            """Whether hidden states are carried from step to step of an episode."""
            operations = {str(each["op"]) for step in self.steps.values() for each in step.operations}
            self.has_memory = not operations.isdisjoint(("stack", "skip"))
            """Whether the observations of an episode have to come one by one."""
            self.repeats_actions = "skip" in operations
            """Whether a decision holds for several steps."""
            self.actor_sequence: list[Actor] = [(actor[0], int(actor[1])) for actor in description["actor_sequence"]]
            """The actors in their order, where it is fixed; else empty."""
            self.drift: Mapping[StepKey, Mapping[str, Any]] = {
                step["key"]: checked_summaries(step["drift"], self.steps[step["key"]].observation_space, name)
                for step in description["steps"]
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

        The arguments are those of :class:`PolicySession`.
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
        :raises ConfigError: Ranked actions of a continuous head are requested, generators are missing, hidden states
            are missing or have another shape, or there is no such sub-step or agent.
        """
        step = self.step(step_key)
        batch = step.batch_of(observations)
        if states or step.network(agent_id).state_sizes:
            batch |= step.states_before(states, episode_start, len(next(iter(batch.values()))), agent_id)
        logits, following = step.outputs(batch, agent_id)
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
        best = [step.ranked(logits, index, ranked, temperature) for index in range(n_rows)] if ranked else []
        return BatchActions(actions, logits, best, following)


class PolicySession:
    """One episode after the other in the raw environment: stacked observations, order of actors, random numbers.

    :meth:`act` suffices for one session. To act for several sessions at once, call :meth:`prepare` of each,
    :meth:`PolicyBundle.act_batch` once with what they gave, stacked, and :meth:`finish` of each; of
    recurrent policies, with :attr:`states` of each, stacked, to which the answer's are assigned then.
    A session belongs to one thread at a time.

    :param bundle: The policy.
    :param seed: Of the generator that sampled actions are drawn from; None: an unpredictable one. A
        :class:`~maze.core.agent.torch_policy.TorchPolicy` with this seed draws the same.
    :param provided: Code of the caller's own that the card lists, by its name there.
    :raises BundleError: Code is missing that there is no way around, or is not known.
    """

    def __init__(
        self, bundle: PolicyBundle, seed: int | None = None, provided: Mapping[str, Callable[..., Any]] | None = None
    ) -> None:
        provided = dict(provided or {})
        check_provided(bundle.card["code"], provided)
        self.bundle = bundle
        self.rng = seeded_generator(seed)
        """Draws sampled actions; a server passes it to `act_batch`."""
        self.converted: Mapping[str, Any] = {}
        """The latest observation's entries as they left the environment, before any wrapper."""
        stages = {key: observation_stages(step.observation_operations, provided) for key, step in bundle.steps.items()}
        self._observation_stages = {key: (first, others) for key, (first, *others) in stages.items()}
        self._action_stages = {
            key: action_stages(step.action_operations, provided) for key, step in bundle.steps.items()
        }
        self._memory = Memory()
        self._sequence = bundle.actor_sequence
        self._n_prepared = 0
        self._actor: Actor = self._sequence[0] if self._sequence else (next(iter(bundle.steps)), 0)

    def reset(self, seed: int | None = None) -> None:
        """Begins another episode.

        :param seed: Begins another stream of random numbers as well; None: the present one goes on.
        """
        self._memory.clear()
        self._n_prepared = 0
        if seed is not None:
            self.rng = seeded_generator(seed)

    def act(
        self, observation: Any, actor_id: Actor | None = None, *, deterministic: bool = True, temperature: float = 1.0
    ) -> Any:
        """The action for an observation of the raw environment. Observations come one by one in their order.

        :param observation: What the raw environment shows. Where the environment's own code converts its states, and
            the caller has not provided it: the entries that it makes of them, as a mapping.
        :param actor_id: The actor: step key and number of the agent. By default the next one in the fixed order.
        :param deterministic: Take the most probable action instead of drawing one.
        :param temperature: Below 1 sharpens the distribution that is drawn from, above 1 flattens it.
        :return: An action as the raw environment takes it; the action's entries as a mapping where its own code
            converts them, and the caller has not provided it.
        :raises EnvironmentContractError: The observation has another shape or type than in training, or all actions
            are masked.
        :raises NonFiniteError: The observation or a logit is not finite.
        """
        inputs = self.prepare(observation, actor_id)
        if inputs is None:
            return self.finish(None)
        step_key, agent_id = self._actor
        rng = None if deterministic else self.rng
        step = self.bundle.steps[step_key]
        if not self.bundle.is_recurrent:
            return self.finish(step.act_one(inputs, agent_id, rng, temperature)[0])
        action, self.states = step.act_one({**inputs, **self.states}, agent_id, rng, temperature)
        return self.finish(action)

    @property
    def states(self) -> dict[str, Array]:
        """Hidden states `[size]` by state key that the latest actor's network decides with; zero where an episode
        begins, empty where it carries none. Those that follow a decision are assigned."""
        if not self.bundle.is_recurrent:
            return {}
        states = self._memory.states.get(self._actor)
        if states is None:
            step_key, agent_id = self._actor
            sizes = self.bundle.steps[step_key].network(agent_id).state_sizes
            states = {key: np.zeros(size, np.float32) for key, size in sizes.items()}
        return states

    @states.setter
    def states(self, states: dict[str, Array]) -> None:
        self._memory.states[self._actor] = states

    def prepare(self, observation: Any, actor_id: Actor | None = None) -> dict[str, Array] | None:
        """What the network of the acting actor takes, float32 `[*shape]` by name, without a batch dimension.

        :param observation: See :meth:`act`.
        :param actor_id: See :meth:`act`.
        :return: None where no decision is due, since the last one holds for several steps; :meth:`finish` is called
            with None then.
        """
        if actor_id is not None:
            actor = (actor_id[0], int(actor_id[1]))
        elif self._sequence:
            actor = self._sequence[self._n_prepared % len(self._sequence)]
        else:
            raise EnvironmentContractError(
                f"The order of actors is not fixed; pass actor_id=(step key, agent), of {list(self.bundle.steps)}."
            )
        step = self.bundle.step(actor[0])
        first, others = self._observation_stages[actor[0]]
        entries = self.converted = first(observation, self._memory, actor)
        if others:
            entries = dict(entries)  # stages change it
            for stage in others:
                entries = stage(entries, self._memory, actor)
                if entries is None:
                    break
        self._actor = actor
        self._n_prepared += 1
        return None if entries is None else step.network_inputs_of(entries)

    def finish(self, action: Mapping[str, Any] | None, is_packed: bool = True) -> Any:
        """The raw environment's action for what the network's heads have chosen.

        :param action: `[*space.shape]` by head: one row of what `act_batch` gave. None where :meth:`prepare` gave None.
        :param is_packed: As the raw environment takes it; otherwise by entry, as Maze's environments take it.
        """
        result: Any = action
        stages = self._action_stages[self._actor[0]]
        for stage in stages if is_packed else stages[:-1]:
            if result is None and not self._memory.is_repeating:
                raise EnvironmentContractError("finish: there is no action, although a decision was due.")
            result = stage(result, self._memory, self._actor)
        return result


def seeded_generator(seed: int | None) -> np.random.Generator:
    """The generator that a policy of torch with this seed draws its actions from."""
    rng = np.random.Generator(np.random.PCG64(seed))
    rng.integers(2**63)  # the policy seeds its generator of torch with it
    return rng


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
