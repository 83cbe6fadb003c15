"""PPO and A2C: environment steps per second relative to stable-baselines3 and to a minimal script, in one run.

All contenders do the same work: 8 environments in process (CartPole-v1, or another), separate two-layer 64-unit tanh
networks, Adam, one torch thread. PPO: 128 steps, minibatches of 256, 4 epochs. A2C: 100 steps, one update per rollout.
Maze runs with its default statistics switched on and written (to a JSON-lines file), stable-baselines3 with its
default monitor.

The *floor* is what cannot be left out: environment steps, batched forward passes, drawing actions and optimiser
updates, timed alone, nothing stored, computed or logged in between. Its share that a contender reaches says how much
of the time its own machinery takes. *by hand* is a minimal script, as a user without a framework would write it.

Rounds alternate between the contenders; medians and the median of the per-round ratios are printed. Absolute numbers
depend on the machine and its load, the ratios much less.

    python benchmarks/training_speed.py            # both algorithms
    python benchmarks/training_speed.py --env LunarLander-v3 --algorithm ppo
    python benchmarks/training_speed.py --quick    # fewer, shorter rounds
    python benchmarks/training_speed.py --json out.json
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

N_ENVS = 8
GAMMA, GAE_LAMBDA, LEARNING_RATE = 0.99, 0.95, 3e-4


@dataclass(frozen=True)
class Work:
    """What one update consists of."""

    algorithm: str
    n_steps: int
    batch_size: int
    n_optimization_epochs: int
    env_id: str = "CartPole-v1"
    """Observations are vectors, actions discrete."""
    n_observed: int = 4
    n_actions: int = 2

    def on(self, env_id: str) -> Work:
        """The same work with another environment."""
        env = gym.make(env_id)
        observation_space, action_space = env.observation_space, env.action_space
        env.close()
        if not isinstance(action_space, gym.spaces.Discrete) or len(observation_space.shape or ()) != 1:
            raise SystemExit(f"--env {env_id}: expected observations that are vectors and discrete actions.")
        return replace(self, env_id=env_id, n_observed=observation_space.shape[0], n_actions=int(action_space.n))

    @property
    def env_steps(self) -> int:
        return self.n_steps * N_ENVS

    @property
    def n_minibatches(self) -> int:
        return self.n_optimization_epochs * (self.env_steps // self.batch_size)


WORK = {
    "ppo": Work("ppo", n_steps=128, batch_size=256, n_optimization_epochs=4),
    "a2c": Work("a2c", n_steps=100, batch_size=800, n_optimization_epochs=1),
}

Contender = Callable[[int], float]
"""Runs a number of updates, returns the seconds they took."""


def networks(work: Work) -> tuple[nn.Sequential, nn.Sequential]:
    """Policy and value network, as all contenders have them."""

    def trunk(n_out: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Linear(work.n_observed, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, n_out)
        )

    return trunk(work.n_actions), trunk(1)


def surrogate_loss(work: Work, policy: nn.Module, critic: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The loss of one minibatch: clipped surrogate (PPO) or policy gradient (A2C), value error, entropy."""
    log_probs = torch.log_softmax(policy(batch["observation"]), dim=-1)
    log_prob = log_probs.gather(1, batch["action"].unsqueeze(1)).squeeze(1)
    if work.algorithm == "ppo":
        ratio = (log_prob - batch["log_prob"]).exp()
        gain = torch.minimum(ratio * batch["advantage"], ratio.clamp(0.8, 1.2) * batch["advantage"])
    else:
        gain = log_prob * batch["advantage"]
    value_loss = (critic(batch["observation"]).squeeze(1) - batch["return"]).square().mean()
    entropy = -(log_probs.exp() * log_probs).sum(dim=1).mean()
    return -gain.mean() + 0.5 * value_loss - 0.0 * entropy


def floor(work: Work) -> Contender:
    """Environment steps, forward passes, sampling and optimiser updates alone."""
    envs = [gym.make(work.env_id) for _ in range(N_ENVS)]
    policy, critic = networks(work)
    optimizer = torch.optim.Adam([*policy.parameters(), *critic.parameters()], lr=LEARNING_RATE)
    observation = torch.zeros(N_ENVS, work.n_observed)
    all_observations = torch.zeros(work.env_steps, work.n_observed)
    n = work.batch_size
    batch = {
        "observation": torch.randn(n, work.n_observed),
        "action": torch.randint(0, work.n_actions, (n,)),
        "log_prob": torch.full((n,), -math.log(work.n_actions)),
        "advantage": torch.randn(n),
        "return": torch.randn(n),
    }
    for index, env in enumerate(envs):
        env.reset(seed=index)

    def run(n_updates: int) -> float:
        start = time.perf_counter()
        for _ in range(n_updates):
            with torch.inference_mode():
                for _ in range(work.n_steps):
                    logits = policy(observation)
                    actions = (logits - torch.empty_like(logits).exponential_().log_()).argmax(dim=1).tolist()
                    for env, action in zip(envs, actions, strict=True):
                        _, _, terminated, truncated, _ = env.step(action)
                        if terminated or truncated:
                            env.reset()
                critic(all_observations)
            for _ in range(work.n_minibatches):
                loss = surrogate_loss(work, policy, critic, batch)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        return time.perf_counter() - start

    return run


def by_hand(work: Work) -> Contender:
    """A minimal, correct training loop without statistics, evaluation or checkpoints."""
    envs = [gym.make(work.env_id) for _ in range(N_ENVS)]
    policy, critic = networks(work)
    optimizer = torch.optim.Adam([*policy.parameters(), *critic.parameters()], lr=LEARNING_RATE)
    n_steps = work.n_steps
    observations = np.zeros((n_steps + 1, N_ENVS, work.n_observed), np.float32)
    actions = np.zeros((n_steps, N_ENVS), np.int64)
    rewards = np.zeros((n_steps, N_ENVS), np.float32)
    terminated = np.zeros((n_steps, N_ENVS), bool)
    truncated = np.zeros((n_steps, N_ENVS), bool)
    for index, env in enumerate(envs):
        observations[-1, index] = env.reset(seed=index)[0]

    def collect() -> dict[tuple[int, int], np.ndarray]:
        finals: dict[tuple[int, int], np.ndarray] = {}
        observations[0] = observations[-1]
        with torch.inference_mode():
            for t in range(n_steps):
                logits = policy(torch.from_numpy(observations[t]))
                drawn = (logits - torch.empty_like(logits).exponential_().log_()).argmax(dim=1)
                actions[t] = drawn.numpy()
                for i, env in enumerate(envs):
                    obs, rewards[t, i], terminated[t, i], truncated[t, i], _ = env.step(actions[t, i].item())
                    if terminated[t, i] or truncated[t, i]:
                        if not terminated[t, i]:
                            finals[t, i] = obs
                        obs, _ = env.reset()
                    observations[t + 1, i] = obs
        return finals

    def targets(finals: dict[tuple[int, int], np.ndarray]) -> dict[str, Tensor]:
        obs = torch.from_numpy(observations)
        acts = torch.from_numpy(actions)
        with torch.inference_mode():
            values = critic(obs).squeeze(-1).numpy()
            next_values = values[1:].copy()
            for (t, i), final in finals.items():
                next_values[t, i] = critic(torch.from_numpy(final)).item()
            log_prob = torch.log_softmax(policy(obs[:-1]), -1).gather(-1, acts.unsqueeze(-1)).squeeze(-1)
        deltas = rewards + GAMMA * next_values * ~terminated - values[:-1]
        decay = (GAMMA * GAE_LAMBDA * ~(terminated | truncated)).astype(np.float32)
        advantages = np.empty_like(deltas)
        last = np.zeros(N_ENVS, np.float32)
        for t in reversed(range(n_steps)):
            last = deltas[t] + decay[t] * last
            advantages[t] = last
        flat = torch.from_numpy(advantages).flatten()
        return {
            "observation": obs[:-1].reshape(-1, work.n_observed),
            "action": acts.flatten(),
            "log_prob": log_prob.flatten().clone(),
            "advantage": (flat - flat.mean()) / (flat.std() + 1e-8),
            "return": flat + torch.from_numpy(values[:-1]).flatten(),
        }

    def run(n_updates: int) -> float:
        start = time.perf_counter()
        for _ in range(n_updates):
            batch = targets(collect())
            for _ in range(work.n_optimization_epochs):
                for index in torch.randperm(work.env_steps).split(work.batch_size):
                    loss = surrogate_loss(work, policy, critic, {key: value[index] for key, value in batch.items()})
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
        return time.perf_counter() - start

    return run


def stable_baselines3(work: Work) -> Contender:
    """The peer, with its own vectorised environment in process and its default monitor."""
    from stable_baselines3 import A2C, PPO
    from stable_baselines3.common.env_util import make_vec_env

    env = make_vec_env(work.env_id, n_envs=N_ENVS, seed=0)
    common = {
        "n_steps": work.n_steps,
        "learning_rate": LEARNING_RATE,
        "gamma": GAMMA,
        "gae_lambda": GAE_LAMBDA,
        "policy_kwargs": {"net_arch": {"pi": [64, 64], "vf": [64, 64]}, "activation_fn": nn.Tanh},
        "device": "cpu",
        "seed": 0,
    }
    if work.algorithm == "ppo":
        model = PPO(
            "MlpPolicy", env, batch_size=work.batch_size, n_epochs=work.n_optimization_epochs, ent_coef=0.0, **common
        )
    else:
        model = A2C("MlpPolicy", env, use_rms_prop=False, normalize_advantage=True, ent_coef=0.0, **common)
    model.learn(work.env_steps)

    def run(n_updates: int) -> float:
        start = time.perf_counter()
        model.learn(n_updates * work.env_steps, reset_num_timesteps=False)
        return time.perf_counter() - start

    return run


def maze(work: Work) -> Contender:
    """Maze's trainer, with default statistics on and written."""
    from maze.core.agent.torch_actor_critic import TorchActorCritic
    from maze.core.agent.torch_policy import TorchPolicy
    from maze.core.agent.torch_state_critic import TorchSharedStateCritic
    from maze.core.log_stats.log_stats import register_log_stats_writer
    from maze.core.log_stats.log_stats_writer_tensorboard import LogStatsWriterTensorboard
    from maze.core.rollout.rollout_generator import RolloutGenerator
    from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
    from maze.distributions.distribution_mapper import DistributionMapper
    from maze.perception.models.built_in.flatten_concat import FlattenConcatPolicyNet, FlattenConcatStateValueNet
    from maze.train.parallelization.vector_env.sequential_vector_env import SequentialVectorEnv
    from maze.train.trainers.a2c.a2c_algorithm_config import A2CAlgorithmConfig
    from maze.train.trainers.a2c.a2c_trainer import A2C
    from maze.train.trainers.ppo.ppo_algorithm_config import PPOAlgorithmConfig
    from maze.train.trainers.ppo.ppo_trainer import PPO

    envs = SequentialVectorEnv([lambda: GymMazeEnv(work.env_id) for _ in range(N_ENVS)], logging_prefix="train")
    envs.seed(list(range(N_ENVS)))
    obs_shapes = {"observation": (work.n_observed,)}
    policy = TorchPolicy(
        networks={
            0: FlattenConcatPolicyNet(obs_shapes, {"action": (work.n_actions,)}, hidden_units=[64, 64], non_lin=nn.Tanh)
        },
        distribution_mapper=DistributionMapper(envs.action_space, {}),
        device="cpu",
    )
    critic = TorchSharedStateCritic(
        networks={0: FlattenConcatStateValueNet(obs_shapes, hidden_units=[64, 64], non_lin=nn.Tanh)},
        obs_spaces_dict=envs.observation_spaces_dict,
        device="cpu",
        stack_observations=False,
    )
    common = {
        "n_epochs": 1,
        "epoch_length": 10,
        "patience": 0,
        "critic_burn_in_epochs": 0,
        "n_rollout_steps": work.n_steps,
        "lr": LEARNING_RATE,
        "gamma": GAMMA,
        "gae_lambda": GAE_LAMBDA,
        "policy_loss_coef": 1.0,
        "value_loss_coef": 0.5,
        "entropy_coef": 0.0,
        "max_grad_norm": 0.5,
        "device": "cpu",
        "rollout_evaluator": None,
    }
    config: PPOAlgorithmConfig | A2CAlgorithmConfig
    if work.algorithm == "ppo":
        config = PPOAlgorithmConfig(
            batch_size=work.batch_size, n_optimization_epochs=work.n_optimization_epochs, clip_range=0.2, **common
        )
    else:
        config = A2CAlgorithmConfig(**common)
    trainer = (PPO if work.algorithm == "ppo" else A2C)(
        algorithm_config=config,
        rollout_generator=RolloutGenerator(envs),
        evaluator=None,
        model=TorchActorCritic(policy=policy, critic=critic, device="cpu"),
        model_selection=None,
    )
    register_log_stats_writer(LogStatsWriterTensorboard(tempfile.mkdtemp(), False))

    def run(n_updates: int) -> float:
        trainer.config.epoch_length = n_updates
        start = time.perf_counter()
        with contextlib.redirect_stdout(io.StringIO()):
            trainer.train(n_epochs=1)
        return time.perf_counter() - start

    return run


CONTENDERS = {"maze": maze, "stable-baselines3": stable_baselines3, "by hand": by_hand, "floor": floor}


def measure(work: Work, n_rounds: int, n_updates: int) -> dict[str, list[float]]:
    """Environment steps per second of every contender and round, the contenders taking turns."""
    runs = {name: make(work) for name, make in CONTENDERS.items()}
    for run in runs.values():
        run(2)
    rates: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(n_rounds):
        for name, run in runs.items():
            rates[name].append(n_updates * work.env_steps / run(n_updates))
    return rates


def report(work: Work, rates: dict[str, list[float]]) -> dict[str, float]:
    """Print the table, return the ratios."""

    def ratio(name: str, base: str) -> float:
        return median(a / b for a, b in zip(rates[name], rates[base], strict=True))

    print(
        f"\n{work.algorithm.upper()}: {N_ENVS} {work.env_id}, {work.n_steps} steps, {work.n_minibatches} updates each"
    )
    print(f"{'':<20}{'env steps/s':>14}{'share of floor':>16}{'x stable-baselines3':>22}")
    for name, of_contender in rates.items():
        line = f"{name:<20}{median(of_contender):>14,.0f}{ratio(name, 'floor'):>16.2f}"
        print(f"{line}{ratio(name, 'stable-baselines3'):>22.2f}")
    return {
        "maze_over_stable_baselines3": ratio("maze", "stable-baselines3"),
        "maze_share_of_floor": ratio("maze", "floor"),
        "stable_baselines3_share_of_floor": ratio("stable-baselines3", "floor"),
        "by_hand_share_of_floor": ratio("by hand", "floor"),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", choices=[*WORK, "all"], default="all")
    parser.add_argument("--env", metavar="ID", help="environment; default: CartPole-v1")
    parser.add_argument("--quick", action="store_true", help="3 rounds of 8 updates instead of 7 of 20")
    parser.add_argument("--json", type=Path, help="write the ratios and rates here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    n_rounds, n_updates = (3, 8) if arguments.quick else (7, 20)
    result = {}
    for name, work in WORK.items():
        if arguments.algorithm in (name, "all"):
            of_env = work.on(arguments.env) if arguments.env else work
            rates = measure(of_env, n_rounds, n_updates)
            result[name] = {**report(of_env, rates), "env_steps_per_second": rates}
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
