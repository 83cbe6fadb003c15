"""SAC: updates per second relative to stable-baselines3 and to SBX (JAX), in one run.

All train Pendulum-v1 with one environment step and one update each, batches of 256, networks of two hidden layers of
256 units with ReLU, squashed Gaussian, tuned entropy coefficient and the same learning rates, on one thread. Maze
runs with its default statistics switched on, the others with their default monitor.

    python benchmarks/sac_speed.py            # 41 rounds of 100 updates
    python benchmarks/sac_speed.py --quick    # eleven rounds of 50
    python benchmarks/sac_speed.py --sbx <interpreter of an environment with SBX>    # see update_rates.py
    python benchmarks/sac_speed.py --json out.json
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))
from benchmarks.update_rates import Contender, main, peer

ENV_ID = "Pendulum-v1"
BATCH_SIZE, HIDDEN_UNITS, LEARNING_RATE, BUFFER_SIZE, WARM_UP = 256, [256, 256], 3e-4, 50_000, 300


def maze() -> Contender:
    """Maze's trainer, without evaluation and files."""
    from maze.core.agent.torch_actor_critic import TorchActorCritic
    from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
    from maze.perception.models.custom_model_composer import CustomModelComposer
    from maze.train.parallelization.distributed_actors.dummy_distributed_workers_with_buffer import (
        DummyDistributedWorkersWithBuffer,
    )
    from maze.train.trainers.common.replay_buffer.uniform_replay_buffer import UniformReplayBuffer
    from maze.train.trainers.sac.sac_algorithm_config import SACAlgorithmConfig
    from maze.train.trainers.sac.sac_runners import SACRunner
    from maze.train.trainers.sac.sac_trainer import SAC

    def make_env() -> Any:
        return GymMazeEnv(ENV_ID)

    env = make_env()
    nets = "maze.perception.models.built_in.flatten_concat.FlattenConcat"
    sizes = {"hidden_units": HIDDEN_UNITS, "non_lin": "torch.nn.ReLU"}
    distribution = "maze.distributions.squashed_gaussian.SquashedGaussianProbabilityDistribution"
    composer = CustomModelComposer(
        action_spaces_dict=env.action_spaces_dict,
        observation_spaces_dict=env.observation_spaces_dict,
        agent_counts_dict=env.agent_counts_dict,
        distribution_mapper_config=[{"action_space": "gym.spaces.Box", "distribution": distribution}],
        policy={
            "_target_": "maze.perception.models.policies.ProbabilisticPolicyComposer",
            "networks": [{"_target_": f"{nets}PolicyNet", **sizes}],
            "substeps_with_separate_agent_nets": [],
        },
        critic={
            "_target_": "maze.perception.models.critics.StateActionCriticComposer",
            "networks": [{"_target_": f"{nets}StateActionValueNet", **sizes}],
        },
    )
    policy, critic = composer.policy, composer.critic
    assert policy is not None
    config = SACAlgorithmConfig(
        n_epochs=1, epoch_length=1, patience=0, batch_size=BATCH_SIZE, lr=LEARNING_RATE, entropy_coef_lr=LEARNING_RATE,
        initial_buffer_size=WARM_UP, replay_buffer_size=BUFFER_SIZE, rollout_evaluator=None,
    )  # fmt: skip
    buffer = UniformReplayBuffer(BUFFER_SIZE, seed=0)
    workers = DummyDistributedWorkersWithBuffer(
        env_factory=make_env, worker_policy=policy, n_rollout_steps=1, n_workers=1, batch_size=BATCH_SIZE,
        rollouts_per_iteration=1, split_rollouts_into_transitions=True, env_instance_seeds=[0], replay_buffer=buffer,
    )  # fmt: skip
    trainer = SAC(config, TorchActorCritic(policy, critic, "cpu"), workers, None, None, seed=0)  # type: ignore[arg-type]
    SACRunner.init_replay_buffer(buffer, config.initial_sampling_policy, WARM_UP, 0, True, 1, make_env)

    def run(n_updates: int) -> None:
        config.epoch_length = n_updates
        trainer.train(n_epochs=1)

    return run


def peer_of(library: str) -> Contender:
    """The same with stable-baselines3 or SBX."""
    settings: dict[str, Any] = {"policy_kwargs": {"net_arch": HIDDEN_UNITS}, "learning_rate": LEARNING_RATE}
    return peer(library, "SAC", ENV_ID, WARM_UP, {"batch_size": BATCH_SIZE, "buffer_size": BUFFER_SIZE, **settings})


if __name__ == "__main__":
    main(__doc__, lambda _: maze(), peer_of, 100)
