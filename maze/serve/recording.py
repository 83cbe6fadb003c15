"""Recording of a policy in its environment: reference cases, an episode, and summaries of observations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from maze.core.agent.hidden_states import HiddenStates
from maze.core.agent.torch_policy import TorchPolicy
from maze.core.env.maze_env import MazeEnv
from maze.core.env.structured_env import ActorID
from maze.core.wrappers.step_skip_wrapper import StepSkipWrapper
from maze.core.wrappers.wrapper import Wrapper
from maze.perception.blocks.recurrent.recurrent_cell import StepRun
from maze.serve.drift import components, entry_summaries
from maze.serve.pipeline import StepKey
from maze.serve.wrappers_as_data import Operations

Array = np.ndarray[Any, Any]

MOST_CASES = 64
MOST_CASE_BYTES = 2**20
"""Size of the reference cases of one actor, and of the recorded episode."""
MOST_EPISODE_STEPS = 32


class Recording:
    """Result of :func:`record`."""

    def __init__(self) -> None:
        self.actors: list[list[ActorID]] = []
        """Acting actors by episode."""
        self.inputs: dict[ActorID, list[dict[str, Array]]] = {}
        """Observations of the policy by actor."""
        self.states: dict[ActorID, list[dict[str, Array]]] = {}
        """Its hidden states `[size]` before each of them, by state key; empty where it carries none."""
        self.converted: dict[StepKey, dict[str, list[Array]]] = {}
        """Components of observations before all wrappers, by sub-step and entry."""
        self.sizes: dict[StepKey, dict[str, int]] = {}
        self.episode: list[dict[str, Any]] = []
        """The beginning of an episode: observations of the raw environment, and network inputs; empty where code of the
        caller is between them."""

    @property
    def actor_sequence(self) -> Sequence[ActorID]:
        """The actors of an environment step in their order; empty if it varies."""
        first = self.actors[0]
        period = next((index for index, actor in enumerate(first) if index and actor == first[0]), len(first))
        sequence = first[:period]
        is_fixed = all(
            actor == sequence[index % period] for actors in self.actors for index, actor in enumerate(actors)
        )
        return sequence if is_fixed else []

    def drift(self, step_key: StepKey) -> dict[str, Any]:
        """Return summaries of a sub-step's observations by entry."""
        return entry_summaries(self.converted.get(step_key, {}), self.sizes.get(step_key, {}))

    def reference_cases(self, policy: TorchPolicy, used: Mapping[StepKey, Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Sample observations of each actor, with the logits and greedy actions of the policy.

        :param policy: The policy.
        :param used: Entries that networks use, by sub-step.
        """
        cases, seen = [], set()
        for actor, inputs in self.inputs.items():
            network = id(policy.network_for(actor))
            if (actor.step_key, network) in seen:
                continue
            seen.add((actor.step_key, network))
            size = sum(np.asarray(inputs[0][name]).size * 4 for name in used[actor.step_key])
            n_cases = max(2, min(MOST_CASES, len(inputs), MOST_CASE_BYTES // max(size, 1)))
            chosen = [int(index) for index in np.linspace(0, len(inputs) - 1, min(n_cases, len(inputs)))]
            batch = _stacked([inputs[index] for index in chosen])
            states = _stacked([self.states[actor][index] for index in chosen])
            run = StepRun({key: torch.from_numpy(array) for key, array in states.items()})
            with torch.inference_mode(), policy.running_for(actor, run):
                output = policy.compute_substep_policy_output(dict(batch), actor)
            logits = {head: values.numpy() for head, values in output.action_logits.items()}
            following = {key: values.numpy() for key, values in run.final.items()}
            copies = {key: array.copy() for key, array in states.items()}
            actions = policy.compute_actions(batch, actor, deterministic=True, states=copies)
            cases.append(
                {
                    "step_key": actor.step_key,
                    "agent_id": actor.agent_id,
                    "inputs": {name: batch[name].astype(np.float32) for name in used[actor.step_key]},
                    "logits": {head: values.astype(np.float32) for head, values in logits.items()},
                    "actions": actions,
                    **({"states": states, "next_states": following} if states else {}),
                }
            )
        return cases


class Tap(Wrapper[Any]):
    """Record the latest observation of the raw environment, before all wrappers."""

    keeps_observations_and_actions = True
    entries: Mapping[str, Any] = MappingProxyType({})

    def reset(self) -> Any:
        self.entries = self._env_reset()
        return self.entries

    def step(self, action: Any) -> Any:
        result = self._env_step(action)
        self.entries = result[0]
        return result


@contextmanager
def tapped(env: Any, operations: Operations) -> Iterator[tuple[Any, Tap]]:
    """Insert a tap around the raw environment; afterwards the environment is as before."""
    tap = Tap(operations.environment)
    if not operations.chain:
        yield tap, tap
        return

    def rewire(innermost: Any) -> None:
        operations.chain[0].env = innermost
        for wrapper in operations.chain[1:]:
            wrapper.env = wrapper.env  # rebinds its methods

    rewire(tap)
    try:
        yield env, tap
    finally:
        rewire(operations.environment)


def record(policy: TorchPolicy, env: MazeEnv[Any], operations: Operations, n_steps: int, seed: int) -> Recording:
    """Take steps with sampled actions, as in training.

    :param policy: The policy.
    :param env: Its environment.
    :param operations: The operations of its wrappers.
    :param n_steps: Number of decisions.
    :param seed: Seed of environment and policy.
    """
    with tapped(env, operations) as (seen_env, tap):
        recording = Recording()
        skips = any(type(each) is StepSkipWrapper for each in operations.chain)
        is_replayable = not any(piece["is_required"] for piece in operations.code) and not skips
        every, n_acted = max(1, n_steps // MOST_CASES), Counter[ActorID]()
        seen_env.seed(seed)
        policy.seed(seed)
        is_done, observation, n_bytes = True, {}, 0
        hidden_states = HiddenStates(1, policy.state_sizes)
        for step in range(max(n_steps, 1)):
            if is_done:
                observation = seen_env.reset()
                hidden_states.reset(np.ones(1, np.bool_))
                recording.actors.append([])
            actor = seen_env.actor_id()
            recording.actors[-1].append(actor)
            kept, states = recording.inputs.setdefault(actor, []), hidden_states.of(actor)
            if n_acted[actor] % every == 0 or len(kept) < 2:
                kept.append({name: np.array(value) for name, value in observation.items()})
                before = {key: array[0].copy() for key, array in states.items()}
                recording.states.setdefault(actor, []).append(before)
            n_acted[actor] += 1
            _note(recording, actor.step_key, tap.entries)
            if is_replayable and len(recording.actors) == 1 and step < MOST_EPISODE_STEPS and n_bytes < MOST_CASE_BYTES:
                case = _episode_case(operations, actor, tap.entries, observation)
                n_bytes += sum(array.nbytes for part in ("observation", "inputs") for array in case[part].values())
                recording.episode.append(case)
            actions = policy.compute_actions(_stacked([observation]), actor, states=states)  # overwrites the states
            observation, _, is_done, _ = seen_env.step({head: action[0] for head, action in actions.items()})
        return recording


def _stacked(rows: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    return {name: np.stack([np.asarray(row[name]) for row in rows]) for name in rows[0]}


def _note(recording: Recording, step_key: StepKey, entries: Mapping[str, Any]) -> None:
    samples = recording.converted.setdefault(step_key, {})
    sizes = recording.sizes.setdefault(step_key, {})
    for name, value in entries.items():
        samples.setdefault(name, []).append(np.array(components(value)))
        sizes[name] = np.asarray(value).size


def _episode_case(
    operations: Operations, actor: ActorID, entries: Mapping[str, Any], observation: Mapping[str, Any]
) -> dict[str, Any]:
    """Return an observation before and after the wrappers."""
    kind = operations.observations[actor.step_key][0]["kind"]
    raw: Mapping[str, Any] = entries
    if kind != "converted":
        state = operations.environment.get_maze_state()
        raw = state if kind == "dict" else dict(zip(entries, state if kind == "tuple" else [state], strict=True))
    return {
        "actor": list(actor),
        "observation": {name: np.array(raw[name]) for name in entries},
        "inputs": {name: np.array(value, np.float32) for name, value in observation.items()},
    }
