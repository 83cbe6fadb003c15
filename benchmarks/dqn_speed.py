"""DQN: updates per second relative to stable-baselines3 and to SBX (JAX), in one run.

All train CartPole-v1 with one environment step and one update each, batches of 128, networks of two hidden layers of
256 units with ReLU, the same learning rate, exploration and targets that follow every 250 updates, on one thread.
As stable-baselines3 has neither, double Q-learning and duelling heads are off (`--double` shows what the former costs).
Maze runs with its default statistics switched on, the others with their default monitor.

    python benchmarks/dqn_speed.py            # 41 rounds of 400 updates
    python benchmarks/dqn_speed.py --quick    # eleven rounds of 200
    python benchmarks/dqn_speed.py --sbx <interpreter of an environment with SBX>    # see update_rates.py
    python benchmarks/dqn_speed.py --json out.json
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))
from benchmarks.update_rates import Contender, main, peer

ENV_ID = "CartPole-v1"
BATCH_SIZE, HIDDEN_UNITS, LEARNING_RATE, BUFFER_SIZE, WARM_UP, TARGET_INTERVAL = 128, [256, 256], 1e-3, 50_000, 300, 250
EPSILON = 0.05


def maze(double: bool = False) -> Contender:
    """Maze's trainer, without evaluation and files.

    :param double: Whether the learned network chooses the actions that the targets value.
    """
    from maze.core.agent.torch_actor_critic import TorchActorCritic
    from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
    from maze.perception.models.custom_model_composer import CustomModelComposer
    from maze.train.parallelization.distributed_actors.dummy_distributed_workers_with_buffer import (
        DummyDistributedWorkersWithBuffer,
    )
    from maze.train.trainers.common.replay_buffer.uniform_replay_buffer import UniformReplayBuffer
    from maze.train.trainers.dqn.dqn_algorithm_config import DQNAlgorithmConfig
    from maze.train.trainers.dqn.dqn_trainer import DQN, EpsilonGreedyPolicy

    def make_env() -> Any:
        return GymMazeEnv(ENV_ID)

    env = make_env()
    nets = "maze.perception.models.built_in.flatten_concat.FlattenConcat"
    sizes = {"hidden_units": HIDDEN_UNITS, "non_lin": "torch.nn.ReLU"}
    composer = CustomModelComposer(
        action_spaces_dict=env.action_spaces_dict,
        observation_spaces_dict=env.observation_spaces_dict,
        agent_counts_dict=env.agent_counts_dict,
        distribution_mapper_config=list(DQNAlgorithmConfig.distributions),
        policy={
            "_target_": "maze.perception.models.policies.ProbabilisticPolicyComposer",
            "networks": [{"_target_": f"{nets}PolicyNet", **sizes}],
            "substeps_with_separate_agent_nets": [],
        },
        critic={
            "_target_": "maze.perception.models.critics.StepStateCriticComposer",
            "networks": [{"_target_": f"{nets}StateValueNet", **sizes}],
        },
    )
    policy, critic = composer.policy, composer.critic
    assert policy is not None
    config = DQNAlgorithmConfig(
        n_epochs=1, epoch_length=1, batch_size=BATCH_SIZE, lr=LEARNING_RATE, double=double, dueling=False,
        target_update_interval=TARGET_INTERVAL, initial_buffer_size=WARM_UP, replay_buffer_size=BUFFER_SIZE,
        initial_epsilon=EPSILON, final_epsilon=EPSILON, rollout_evaluator=None,
    )  # fmt: skip
    workers = DummyDistributedWorkersWithBuffer(
        env_factory=make_env, worker_policy=EpsilonGreedyPolicy(policy), n_rollout_steps=1, n_workers=1,
        batch_size=BATCH_SIZE, rollouts_per_iteration=WARM_UP, split_rollouts_into_transitions=True,
        env_instance_seeds=[0], replay_buffer=UniformReplayBuffer(BUFFER_SIZE, seed=0),
    )  # fmt: skip
    trainer = DQN(config, TorchActorCritic(policy, critic, "cpu"), workers, seed=0)  # type: ignore[arg-type]
    workers.collect_rollouts()
    workers.rollouts_per_iteration = 1

    def run(n_updates: int) -> None:
        config.epoch_length = n_updates
        trainer.train(n_epochs=1)

    return run


def peer_of(library: str) -> Contender:
    """The same with stable-baselines3 or SBX."""
    settings: dict[str, Any] = {
        "learning_rate": LEARNING_RATE,
        "batch_size": BATCH_SIZE,
        "buffer_size": BUFFER_SIZE,
        "train_freq": 1,
        "gradient_steps": 1,
        "target_update_interval": TARGET_INTERVAL,
        "exploration_initial_eps": EPSILON,
        "exploration_final_eps": EPSILON,
        "policy_kwargs": {"net_arch": HIDDEN_UNITS},
    }
    return peer(library, "DQN", ENV_ID, WARM_UP, settings)


if __name__ == "__main__":
    main(__doc__, lambda options: maze(options.double), peer_of, 400, {"--double": "Maze with double Q-learning"})
