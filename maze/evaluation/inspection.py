"""Decision inspector: observations, action distributions, values and the actions of other policies, step by step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from maze.core.agent.policy import Policy, acting_in
from maze.core.agent.torch_actor_critic import TorchActorCritic
from maze.core.env.base_env import is_truncated
from maze.core.env.structured_env import ActorID
from maze.core.errors import MazeError
from maze.core.rendering.renderer import pixels_png
from maze.core.rendering.trajectory_page import actor_text
from maze.core.trajectory_recording.records.trajectory_record import StateTrajectoryRecord
from maze.core.wrappers.trajectory_recording_wrapper import TrajectoryRecordingWrapper

MOST_ENTRIES, MOST_ROWS, MOST_COLUMNS = 256, 40, 12
"""Limits of the displayed part of an observation; the page states its full size."""
_DIGITS = 5
_MASK = "_mask"


class InspectedEpisode(NamedTuple):
    """An episode with its decisions.

    :param record: States, actions and events.
    :param decisions: The decisions of each environment step as plain values, one for each sub-step.
    """

    record: StateTrajectoryRecord
    decisions: list[list[dict[str, Any]]]


def inspected_episode(
    env: Any,
    policy: Policy,
    others: Mapping[str, Policy],
    actor_critic: TorchActorCritic | None,
    gamma: float,
    deterministic: bool,
) -> InspectedEpisode:
    """Play an episode and record every decision.

    :param env: The seeded environment.
    :param policy: The policy that acts.
    :param others: Policies by name that compute an action in each sub-step, which is not executed.
    :param actor_critic: The policy with its critic, for values; `None`: no values.
    :param gamma: Discount factor of temporal-difference errors.
    :param deterministic: Take deterministic actions instead of sampling.
    """
    env = TrajectoryRecordingWrapper.wrap(env)
    observation = env.reset()
    act = acting_in(env, policy, deterministic)
    alternatives = {name: acting_in(env, other, True) for name, other in others.items()}
    decisions: list[list[dict[str, Any]]] = [[]]
    values: list[float | None] = []
    rewards: list[float] = [0.0]
    seen: list[Any] = []
    done, info = False, {}
    while not done:
        actor = env.actor_id()
        value = _value(actor_critic, observation, actor, seen)
        if not seen:
            values.append(value)
        action = act(observation, actor)
        with env.context.events_dropped():
            others_of_step = [_alternative(*other, observation, actor, action) for other in alternatives.items()]
        decisions[-1].append(
            {
                "actor": actor_text(actor),
                "value": _rounded(value),
                **_considered(policy, env, observation, actor, action),
                "planned": _planned(policy),
                "others": others_of_step,
            }
        )
        seen.append(observation)
        time = env.get_env_time()
        observation, reward, done, info = env.step(action)
        rewards[-1] += float(np.sum(reward))
        if not done and env.get_env_time() != time:
            decisions.append([])
            rewards.append(0.0)
            seen = []
    after = _value(actor_critic, observation, env.actor_id(), []) if is_truncated(done, info) else 0.0
    record = env.episode_record
    env.publish_trajectory()  # adds the last state
    for step, ahead in zip(decisions, _temporal_differences(rewards, values, after, gamma), strict=True):
        step[0]["td_error"] = _rounded(ahead)
    return InspectedEpisode(record, decisions)


def _temporal_differences(
    rewards: Sequence[float], values: Sequence[float | None], after: float | None, gamma: float
) -> list[float | None]:
    """Return r + gamma V(next) - V of each step; `None`: a value is unknown."""
    following = [*values[1:], after]
    return [
        None if here is None or there is None else reward + gamma * there - here
        for reward, here, there in zip(rewards, values, following, strict=True)
    ]


def _value(
    actor_critic: TorchActorCritic | None, observation: Any, actor: ActorID, seen: Sequence[Any]
) -> float | None:
    """Return the critic's value; `None`: there is no critic, or it cannot value a single sub-step."""
    if actor_critic is None:
        return None
    batch, known = _batch(observation), [_batch(each) for each in seen]
    try:
        return float(actor_critic.bootstrap_values(batch, actor, [*known, batch], len(known)).reshape(-1)[0])
    except (MazeError, RuntimeError, KeyError, IndexError):
        return None


def _considered(policy: Policy, env: Any, observation: Any, actor: ActorID, action: Any) -> dict[str, Any]:
    """Describe the observation with the importance of its entries, and the distributions of the action heads."""
    from maze.core.agent.torch_policy import TorchPolicy

    importance: Mapping[str, Any] = {}
    distributions: Mapping[str, Any] = {}
    if isinstance(policy, TorchPolicy):
        importance, distributions = _gradients(policy, env, observation, actor, action)
    return {
        "observation": [_seen(name, np.asarray(value), importance.get(name)) for name, value in observation.items()],
        "heads": [_head(name, taken, distributions.get(name)) for name, taken in action.items()],
    }


def _planned(policy: Policy) -> list[dict[str, Any]]:
    """Return the estimates of a rollout policy for the candidates of its latest decision, best first."""
    if (found := getattr(policy, "last_decision", None)) is None:
        return []
    rows = [
        {
            "action": ", ".join(f"{head}: {_list(np.asarray(value).reshape(-1))}" for head, value in action.items()),
            "mean": _rounded(float(found.values[index])),
            "interval": [_rounded(float(end)) for end in (found.low[index], found.high[index])],
            "scenarios": int(found.scenarios[index]),
            "is_base": index == 0,
            "is_taken": index == found.chosen,
        }
        for index, action in enumerate(found.actions)
    ]
    order = np.argsort(-np.nan_to_num(found.values, nan=-np.inf), kind="stable")
    return [rows[index] for index in order[:MOST_ROWS]]


def _gradients(
    policy: Any, env: Any, observation: Any, actor: ActorID, action: Any
) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """Return absolute gradients of the action's log-probability (saliency, Simonyan et al. 2014), and distributions."""
    import torch

    tensors = {
        name: torch.as_tensor(np.asarray(value, np.float32)[np.newaxis], device=policy.device).requires_grad_()
        for name, value in observation.items()
    }
    with policy.remembering(env, actor):
        output = policy.compute_substep_policy_output(tensors, actor)
    taken = {name: torch.as_tensor(value, device=policy.device) for name, value in _batch(action).items()}
    distributions: Mapping[str, Any] = output.prob_dist.distribution_dict
    try:
        log_prob = output.prob_dist.joint_log_prob(taken).sum()
        gradients: Any = torch.autograd.grad(log_prob, list(tensors.values()), allow_unused=True)
    except (RuntimeError, ValueError, NotImplementedError):  # a distribution without a density
        return {}, distributions
    found = dict(zip(tensors, gradients, strict=True))
    return {name: each[0].abs().cpu().numpy() for name, each in found.items() if each is not None}, distributions


def _seen(name: str, value: np.ndarray[Any, Any], importance: Any) -> dict[str, Any]:
    """Describe an entry of an observation for the page: as bars, image, table, or the actions that a mask allows."""
    shown: dict[str, Any] = {"name": name, "shape": list(value.shape)}
    if name.endswith(_MASK):
        allowed = np.flatnonzero(value.reshape(-1)).tolist()
        return {**shown, "kind": "mask", "values": allowed[:MOST_ENTRIES], "n_allowed": len(allowed)}
    if _is_image(value):
        shown.update(kind="image", png=_png(value))
        return shown if importance is None else {**shown, "importance_png": _png(np.asarray(importance), is_sum=True)}
    if value.ndim >= 2:
        rows = value.reshape(value.shape[0], -1)
        # Trailing rows of zeros, such as the free slots of an inventory, are left out.
        n_used = int(np.flatnonzero(rows.any(axis=1)).max(initial=-1)) + 1
        weights = None if importance is None else importance.reshape(rows.shape)
        shown.update(kind="table", n_rows=n_used, n_columns=rows.shape[1], values=_table(rows[:n_used]))
        return shown if weights is None else {**shown, "importance": _table(weights[:n_used])}
    shown.update(kind="vector", values=_list(value.reshape(-1)))
    return shown if importance is None else {**shown, "importance": _list(importance.reshape(-1))}


def _is_image(value: np.ndarray[Any, Any]) -> bool:
    if value.ndim not in (2, 3) or min(value.shape[-2:]) < 1:
        return False
    is_colour = value.ndim == 3 and (value.shape[-1] in (1, 3) or value.shape[0] in (1, 3, 4))
    return (value.dtype == np.uint8 or is_colour) and min(sorted(value.shape)[-2:]) >= 16


def _png(pixels: np.ndarray[Any, Any], is_sum: bool = False) -> bytes:
    """Encode an image, or the last one of a stack, as PNG.

    :param pixels: The values.
    :param is_sum: Show the sum over the channels, or over the stack.
    """
    has_colours_last = pixels.ndim == 3 and pixels.shape[-1] in (1, 3)
    if is_sum and pixels.ndim == 3:
        pixels = pixels.sum(axis=-1 if has_colours_last else 0)
    elif pixels.ndim == 3 and not has_colours_last:
        pixels = pixels.transpose(1, 2, 0) if pixels.shape[0] == 3 else pixels[-1]
    if pixels.ndim == 3 and pixels.shape[-1] == 1:
        pixels = pixels[..., 0]
    if pixels.dtype != np.uint8:
        low, high = float(pixels.min()), float(pixels.max())
        pixels = (255 * (pixels - low) / (high - low or 1.0)).astype(np.uint8)
    return pixels_png(pixels)


def _head(name: str, taken: Any, distribution: Any) -> dict[str, Any]:
    """Describe an action head: probabilities of all choices, or the typical range of a density."""
    from maze.distributions.bernoulli import BernoulliProbabilityDistribution
    from maze.distributions.categorical import CategoricalProbabilityDistribution
    from maze.distributions.multi_categorical import MultiCategoricalProbabilityDistribution

    shown: dict[str, Any] = {"name": name, "taken": _list(np.asarray(taken).reshape(-1))}
    if isinstance(distribution, MultiCategoricalProbabilityDistribution):
        return {**shown, "kind": "choices", "values": [_probabilities(each) for each in distribution.parts]}
    if isinstance(distribution, CategoricalProbabilityDistribution):
        return {**shown, "kind": "probabilities", "values": _probabilities(distribution)}
    if isinstance(distribution, BernoulliProbabilityDistribution):
        return {**shown, "kind": "switches", "values": _probabilities(distribution)}
    if hasattr(distribution, "typical_range"):
        low, high = (_list(end.detach().cpu().numpy()[0].reshape(-1)) for end in distribution.typical_range())
        return {**shown, "kind": "density", "low": low, "high": high}
    return {**shown, "kind": "action"}


def _probabilities(distribution: Any) -> list[float | None]:
    return _list(distribution.dist.probs.detach().cpu().numpy()[0].reshape(-1))


def _alternative(
    name: str, act: Callable[[Any, ActorID], Any], observation: Any, actor: ActorID, action: Any
) -> dict[str, Any]:
    """Describe the action of another policy."""
    try:
        answer = act(observation, actor)
    except Exception as error:  # a policy that needs other wrappers or another state
        return {"name": name, "differs": False, "action": f"no action: {type(error).__name__}: {error}"[:200]}
    differs = any(not np.allclose(answer[head], action[head], rtol=1e-3, atol=1e-6) for head in action.keys() & answer)
    taken = {head: _list(np.asarray(value).reshape(-1)) for head, value in answer.items()}
    text = ", ".join(f"{head}: {', '.join(map(str, values))}" for head, values in taken.items())
    return {"name": name, "differs": bool(differs), "action": text}


def _batch(observation: Mapping[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    return {name: np.asarray(value)[np.newaxis] for name, value in observation.items()}


def _table(rows: np.ndarray[Any, Any]) -> list[list[float | None]]:
    return [_list(row[:MOST_COLUMNS]) for row in rows[:MOST_ROWS]]


def _list(values: np.ndarray[Any, Any]) -> list[float | None]:
    return [_rounded(value) for value in values[:MOST_ENTRIES].tolist()]


def _rounded(value: float | None) -> float | None:
    """Round to a few digits; `None`: no finite number."""
    if value is None or not np.isfinite(value):
        return None
    return value if isinstance(value, (bool, int)) else float(f"{value:.{_DIGITS}g}")
