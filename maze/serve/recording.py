"""A policy's steps in its environment: reference cases, an episode, and what observations look like."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from maze.core.agent.torch_policy import TorchPolicy
from maze.core.env.maze_env import MazeEnv
from maze.core.env.structured_env import ActorID
from maze.core.wrappers.step_skip_wrapper import StepSkipWrapper
from maze.core.wrappers.wrapper import ActionWrapper
from maze.serve.drift import components, entry_summaries
from maze.serve.pipeline import StepKey
from maze.serve.wrappers_as_data import Operations, wrappers_of

Array = np.ndarray[Any, Any]

MOST_CASES = 64
MOST_CASE_BYTES = 2**20
"""Of the reference cases of one actor, and of the recorded episode."""
MOST_EPISODE_STEPS = 32


class Recording:
    """What was seen and done, see :func:`record`."""

    def __init__(self) -> None:
        self.actors: list[list[ActorID]] = []
        """Who acted, by episode."""
        self.inputs: dict[ActorID, list[dict[str, Array]]] = {}
        """What the policy observed, by actor."""
        self.converted: dict[StepKey, dict[str, list[Array]]] = {}
        """Components of what the environment showed, by sub-step and entry."""
        self.sizes: dict[StepKey, dict[str, int]] = {}
        self.episode: list[dict[str, Any]] = []
        """The beginning of an episode: what the raw environment shows, what the network takes, and the most probable
        action as the raw environment takes it; empty where code of the caller's comes in between."""

    @property
    def actor_sequence(self) -> Sequence[ActorID]:
        """The actors of an environment step in their order, if it is always the same, else nobody."""
        first = self.actors[0]
        period = next((index for index, actor in enumerate(first) if index and actor == first[0]), len(first))
        sequence = first[:period]
        is_fixed = all(
            actor == sequence[index % period] for actors in self.actors for index, actor in enumerate(actors)
        )
        return sequence if is_fixed else []

    def drift(self, step_key: StepKey) -> dict[str, Any]:
        """The summaries of a sub-step's observations by entry."""
        return entry_summaries(self.converted.get(step_key, {}), self.sizes.get(step_key, {}))

    def reference_cases(self, policy: TorchPolicy, used: Mapping[StepKey, Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Observations of each actor, spread over the recording, with the policy's logits and most probable actions.

        :param policy: The policy.
        :param used: By sub-step the entries that networks look at.
        """
        cases, seen = [], set()
        for actor, inputs in self.inputs.items():
            network = id(policy.network_for(actor))
            if (actor.step_key, network) in seen:
                continue
            seen.add((actor.step_key, network))
            size = sum(np.asarray(inputs[0][name]).size * 4 for name in used[actor.step_key])
            n_cases = max(2, min(MOST_CASES, len(inputs), MOST_CASE_BYTES // max(size, 1)))
            chosen = [inputs[int(index)] for index in np.linspace(0, len(inputs) - 1, min(n_cases, len(inputs)))]
            batch = {name: np.stack([np.asarray(each[name]) for each in chosen]) for name in chosen[0]}
            with torch.inference_mode():
                output = policy.compute_substep_policy_output(dict(batch), actor)
            logits = {head: values.numpy() for head, values in output.action_logits.items()}
            cases.append(
                {
                    "step_key": actor.step_key,
                    "agent_id": actor.agent_id,
                    "inputs": {name: batch[name].astype(np.float32) for name in used[actor.step_key]},
                    "logits": {head: values.astype(np.float32) for head, values in logits.items()},
                    "actions": policy.compute_actions(batch, actor, deterministic=True),
                }
            )
        return cases


def record(policy: TorchPolicy, env: MazeEnv[Any], operations: Operations, n_steps: int, seed: int) -> Recording:
    """Takes steps with sampled actions, as in training.

    :param policy: The policy.
    :param env: Its environment.
    :param operations: What its wrappers do.
    :param n_steps: Number of decisions.
    :param seed: Of environment and policy.
    """
    recording = Recording()
    chain, base = wrappers_of(env)
    is_replayable = not operations.needs_code() and not any(type(each) is StepSkipWrapper for each in chain)
    env.seed(seed)
    policy.seed(seed)
    is_done, observation, n_bytes = True, {}, 0
    for step in range(max(n_steps, 1)):
        if is_done:
            observation = env.reset()
            recording.actors.append([])
        actor = env.actor_id()
        recording.actors[-1].append(actor)
        recording.inputs.setdefault(actor, []).append({name: np.array(value) for name, value in observation.items()})
        state = base.get_maze_state()
        entries = base.observation_conversion_dict[actor.step_key].maze_to_space(state)
        _note(recording, actor.step_key, entries)
        if is_replayable and len(recording.actors) == 1 and step < MOST_EPISODE_STEPS and n_bytes < MOST_CASE_BYTES:
            case = _episode_case(policy, base, chain, operations, actor, state, entries, observation)
            n_bytes += sum(array.nbytes for part in ("observation", "inputs") for array in case[part].values())
            recording.episode.append(case)
        action = policy.compute_action(observation, actor_id=actor)
        observation, _, is_done, _ = env.step(action)
    return recording


def _note(recording: Recording, step_key: StepKey, entries: Mapping[str, Any]) -> None:
    samples = recording.converted.setdefault(step_key, {})
    sizes = recording.sizes.setdefault(step_key, {})
    for name, value in entries.items():
        samples.setdefault(name, []).append(np.array(components(value)))
        sizes[name] = np.asarray(value).size


def _episode_case(
    policy: TorchPolicy,
    base: MazeEnv[Any],
    chain: Sequence[Any],
    operations: Operations,
    actor: ActorID,
    state: Any,
    entries: Mapping[str, Any],
    observation: Mapping[str, Any],
) -> dict[str, Any]:
    """An observation on its way to the network, and the most probable action on its way back, by the real wrappers."""
    kind = operations.observations[actor.step_key][0]["kind"]
    shown: Mapping[str, Any] = entries
    if kind == "single":
        shown = dict.fromkeys(entries, state)
    elif kind in ("dict", "tuple"):
        shown = state if kind == "dict" else dict(zip(entries, state, strict=True))
    action: Any = policy.compute_action(dict(observation), actor_id=actor, deterministic=True)
    for wrapper in reversed(chain):
        if issubclass(type(wrapper), ActionWrapper):
            action = wrapper.action(action)
    clip = base._step_path.clip
    action = action if clip is None else clip(action)
    if operations.actions[actor.step_key][-1]["kind"] != "converted":
        action = base.action_conversion_dict[actor.step_key].space_to_maze(action, state)
    parts: Mapping[str, Any] = action if isinstance(action, dict) else {"action": action}
    if isinstance(action, tuple):
        parts = {f"action_{index}": part for index, part in enumerate(action)}
    return {
        "actor": list(actor),
        "observation": {name: np.array(shown[name]) for name in entries},
        "inputs": {name: np.array(value, np.float32) for name, value in observation.items()},
        "action": {name: np.array(value) for name, value in parts.items()},
    }
