"""Overrides that shorten training runs to a fraction of a second, and change nothing else."""

from __future__ import annotations

from typing import Any

ON_POLICY = {
    "algorithm.epoch_length": 1,
    "algorithm.n_rollout_steps": 4,
    "runner.concurrency": 2,
    "algorithm.rollout_evaluator.n_episodes": 1,
}
SAC = {
    "algorithm.epoch_length": 2,
    "algorithm.batch_size": 4,
    "algorithm.initial_buffer_size": 16,
    "algorithm.rollout_evaluator.n_episodes": 1,
}
SHORTER: dict[str, dict[str, Any]] = {
    "a2c": ON_POLICY,
    "ppo": {**ON_POLICY, "algorithm.batch_size": 4},
    "impala": {
        "algorithm.epoch_length": 1,
        "algorithm.n_rollout_steps": 4,
        "algorithm.num_actors": 2,
        "algorithm.actors_batch_size": 2,
        "algorithm.rollout_evaluator.n_episodes": 1,
    },
    "sac": SAC,
    "sacfd": {**SAC, "runner.initial_demonstration_trajectories.n_workers": 1},
    "bc": {"algorithm.eval_every_k_iterations": 2, "algorithm.n_eval_episodes": 1},
    "es": {
        "algorithm.n_rollouts_per_update": 2,
        "algorithm.max_steps": 20,
        "runner.n_eval_rollouts": 1,
        "runner.shared_noise_table_size": 1_000_000,
    },
}
SEEDS = {"seeding.env_base_seed": 11, "seeding.agent_base_seed": 12}
