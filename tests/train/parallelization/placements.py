"""What tests of placements compare: everything that a training ends with, and everything that rollouts hold."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from maze.core.rollout.rollout_generator import RolloutGenerator
from maze.maze_cli import main
from tests.train.parallelization.toy_policies import ENVS, make_policy

TINY = [
    "algorithm.n_epochs=2",
    "seeding.env_base_seed=1",
    "seeding.agent_base_seed=2",
]


def trained(directory: Path, *arguments: str, name: str = "CartPole-v1") -> dict[str, torch.Tensor]:
    """All tensors of the state that a training ends in, by their place in it."""
    usual = ["algorithm.epoch_length=2", "algorithm.rollout_evaluator.n_episodes=3"]
    few = TINY if "algorithm=es" in arguments else [*TINY, *usual]
    assert main(["-cn", "conf_train", f"env.name={name}", *few, *arguments, f"hydra.run.dir={directory}"]) == 0
    return dict(_tensors(torch.load(directory / "latest.pt", weights_only=True)))


def _tensors(state: Any, place: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(state, torch.Tensor):
        yield place, state
    elif isinstance(state, dict | list | tuple):
        for key, value in state.items() if isinstance(state, dict) else enumerate(state):
            yield from _tensors(value, f"{place}/{key}")


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """Places at which two states differ."""
    return [place for place in one.keys() | other.keys() if not torch.equal(one[place], other[place])]


def recorded_by(placement: Any, name: str, n_envs: int = 3) -> list[Any]:
    """Return the results of two rollouts and an evaluation with a placement, and the final state."""
    env = placement.vector_env(ENVS[name], n_envs, None)
    env.seed(list(range(n_envs)))
    policy = make_policy(ENVS[name])
    generator = RolloutGenerator(env, record_logits=True)
    columns = generator.allocate(6, policy)
    results: list[Any] = []
    for _ in range(2):
        generator.collect(policy, columns)
        finals = [(entry[:3], _listed(entry[3])) for entry in sorted(columns.final_observations, key=lambda e: e[:2])]
        arrays = {
            key: [_listed(part.observations), _listed(part.actions), _listed(part.logits), _listed(part.valid)]
            for key, part in columns.substeps.items()
        }
        results += [arrays, finals, _listed(columns.rewards), _listed(columns.actor_rewards), columns.last_actor_ids]
        results += [_listed(columns.terminated), _listed(columns.truncated), columns.actor_sequence]
    results.append(_listed(env.state_dict()["environments"]))
    env.clear_epoch_stats()
    env.play_episodes(policy, np.array([2, *[1] * (n_envs - 1)]), False)
    env.write_epoch_stats()
    learned = [(key, value) for key, value in env.epoch_stats.last_stats.items() if not _is_of_cluster(key)]
    results += [sorted(map(str, learned)), _listed(policy.rng_state()["numpy"])]
    env.close()
    return results


def _is_of_cluster(key: Any) -> bool:
    """Whether a statistic is about the work of actors, which differs between equal runs."""
    return str(key.event.__qualname__).startswith("ClusterEvents")


def _listed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _listed(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_listed(part) for part in value]
    return value.tolist() if isinstance(value, np.ndarray) else value
