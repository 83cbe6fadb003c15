"""An update of A2C, PPO and SAC moves the same weights as that of stable-baselines3, from the same data."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.wrappers import TimeLimit
from torch import nn

from maze.core.agent.torch_actor_critic import TorchActorCritic
from maze.core.agent.torch_policy import TorchPolicy
from maze.core.agent.torch_state_action_critic import TorchStepStateActionCritic
from maze.core.agent.torch_state_critic import TorchSharedStateCritic
from maze.core.env.structured_env import ActorID
from maze.core.rollout.rollout_generator import RolloutGenerator
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.distributions.distribution_mapper import DistributionMapper
from maze.perception.models.built_in.flatten_concat import (
    FlattenConcatPolicyNet,
    FlattenConcatStateActionValueNet,
    FlattenConcatStateValueNet,
)
from maze.train.parallelization.vector_env.sequential_vector_env import SequentialVectorEnv
from maze.train.trainers.a2c.a2c_algorithm_config import A2CAlgorithmConfig
from maze.train.trainers.a2c.a2c_trainer import A2C
from maze.train.trainers.common.replay_buffer.transitions import TransitionBatch
from maze.train.trainers.ppo.ppo_algorithm_config import PPOAlgorithmConfig
from maze.train.trainers.ppo.ppo_trainer import PPO
from maze.train.trainers.sac.sac_algorithm_config import SACAlgorithmConfig
from tests.train.trainers.sac.sac_models import learner_of

sb3 = pytest.importorskip("stable_baselines3")
ReplayBufferSamples = sb3.common.type_aliases.ReplayBufferSamples

SQUASHED = "maze.distributions.squashed_gaussian.SquashedGaussianProbabilityDistribution"
N_ENVS, N_STEPS, GAMMA = 4, 40, 0.95


def make_env():
    """Poles that fall, and episodes that are cut off."""
    return TimeLimit(gym.make("CartPole-v1").unwrapped, 15)


def peer(algorithm, **settings):
    """A model of stable-baselines3."""
    widths = {"net_arch": {"pi": [16, 16], "vf": [16, 16]}, "activation_fn": nn.Tanh}
    widths |= {"optimizer_class": torch.optim.Adam, "optimizer_kwargs": {"eps": 1e-5}}
    env = sb3.common.vec_env.DummyVecEnv([make_env] * N_ENVS)
    model = algorithm(
        "MlpPolicy", env, learning_rate=0.01, n_steps=N_STEPS, gamma=GAMMA, ent_coef=0.01, vf_coef=0.5,
        max_grad_norm=0.5, policy_kwargs=widths, device="cpu", seed=0, **settings,
    )  # fmt: skip
    model.set_logger(sb3.common.logger.Logger(None, []))
    return model


def layers_of(*modules):
    return [layer for module in modules for layer in module.modules() if isinstance(layer, nn.Linear)]


def parameters_of(model):
    return layers_of(
        model.policy.mlp_extractor.policy_net, model.policy.action_net, model.policy.mlp_extractor.value_net,
        model.policy.value_net,
    )  # fmt: skip


def trainer_with(model, trainer_class, config):
    """A trainer of Maze that starts from the peer's weights."""
    envs = SequentialVectorEnv([lambda: GymMazeEnv(make_env()) for _ in range(N_ENVS)], logging_prefix="train")
    envs.seed(list(range(N_ENVS)))
    shapes = {"observation": (4,)}
    actor = FlattenConcatPolicyNet(shapes, {"action": (2,)}, [16, 16], nn.Tanh)
    value = FlattenConcatStateValueNet(shapes, [16, 16], nn.Tanh)
    for own, other in zip(layers_of(actor, value), parameters_of(model), strict=True):
        own.load_state_dict(other.state_dict())
    policy = TorchPolicy({0: actor}, DistributionMapper(envs.action_space, {}), "cpu")
    policy.seed(0)
    critic = TorchSharedStateCritic({0: value}, envs.observation_spaces_dict, "cpu", stack_observations=False)
    trainer = trainer_class(config, RolloutGenerator(envs), None, TorchActorCritic(policy, critic, "cpu"), None, seed=0)
    return trainer, layers_of(actor, value)


def fill(model, columns):
    """Gives the peer a rollout of Maze, in the way in which it collects its own."""
    rows = columns.substeps[0]
    starts = np.ones(N_ENVS)
    finals = {(entry.tick, entry.env_index): entry.observation["observation"] for entry in columns.final_observations}
    assert finals
    assert columns.terminated.any()
    buffer = model.rollout_buffer
    buffer.reset()
    with torch.no_grad():
        for tick in range(N_STEPS):
            observation = torch.from_numpy(rows.observations["observation"][tick])
            action = torch.from_numpy(rows.actions["action"][tick])
            values, log_probs, _ = model.policy.evaluate_actions(observation, action)
            rewards = columns.rewards[tick].copy()
            for env in range(N_ENVS):
                if (tick, env) in finals:
                    final = torch.from_numpy(np.asarray(finals[tick, env], np.float32))[None]
                    rewards[env] += GAMMA * model.policy.predict_values(final).item()
            buffer.add(observation.numpy(), action.numpy()[:, None], rewards, starts, values, log_probs)
            starts = (columns.terminated[tick] | columns.truncated[tick]).astype(float)
        last = torch.from_numpy(columns.last_observations[0]["observation"])
        buffer.compute_returns_and_advantage(last_values=model.policy.predict_values(last), dones=starts)


COMMON = {
    "n_epochs": 1, "epoch_length": 1, "patience": 0, "n_rollout_steps": N_STEPS, "lr": 0.01, "gamma": GAMMA,
    "entropy_coef": 0.01, "value_loss_coef": 0.5, "max_grad_norm": 0.5, "optimizer_eps": 1e-5,
    "rollout_evaluator": None,
}  # fmt: skip
CASES = {
    "a2c": (
        lambda: peer(sb3.A2C, use_rms_prop=False, gae_lambda=1.0),
        A2C,
        A2CAlgorithmConfig(**COMMON, gae_lambda=1.0, advantage_normalization=False),
    ),
    "ppo": (  # one minibatch, so that their order does not matter
        lambda: peer(sb3.PPO, gae_lambda=0.9, batch_size=N_ENVS * N_STEPS, n_epochs=5, clip_range=0.1),
        PPO,
        PPOAlgorithmConfig(
            **COMMON, gae_lambda=0.9, batch_size=N_ENVS * N_STEPS, n_optimization_epochs=5, clip_range=0.1
        ),
    ),
}


@pytest.mark.parametrize(("make_peer", "trainer_class", "config"), CASES.values(), ids=CASES)
def test_an_update_moves_the_same_weights(make_peer, trainer_class, config):
    model = make_peer()
    before = [layer.weight.detach().clone() for layer in parameters_of(model)]
    trainer, layers = trainer_with(model, trainer_class, config)
    for _ in range(3):  # from then on with moments of the optimizer, and episodes that began in the rollout before
        trainer.train(n_epochs=1)
        fill(model, trainer._columns)
        model._update_current_progress_remaining(0, 1)
        model.train()
        for own, other in zip(layers, parameters_of(model), strict=True):
            # one step moves a weight by up to 0.01; the peer normalises advantages with the unbiased deviation
            torch.testing.assert_close(own.weight, other.weight, rtol=0, atol=2e-4)
            torch.testing.assert_close(own.bias, other.bias, rtol=0, atol=2e-4)
    moved = [(layer.weight - old).abs().max() for layer, old in zip(layers, before, strict=True)]
    assert min(moved) > 0.01


class Nowhere(gym.Env):
    """Spaces for SAC."""

    observation_space = gym.spaces.Box(-1, 1, (3,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (2,), np.float32)


def without_noise(linear):
    """Logits of a standard deviation beyond the smallest one: actions are the means, and it gets no gradient."""
    with torch.no_grad():
        linear.weight.zero_()
        linear.bias.fill_(-50.0)


def test_updates_of_sac_without_noise_move_the_same_weights():
    model = sb3.SAC(
        "MlpPolicy", Nowhere(), learning_rate=0.01, gamma=0.9, tau=0.1, ent_coef=0.0, device="cpu", seed=0,
        policy_kwargs={"net_arch": [16, 16]},
    )  # fmt: skip
    model.set_logger(sb3.common.logger.Logger(None, []))
    without_noise(model.actor.log_std)
    observations, action_space = (
        {"observation": Nowhere.observation_space},
        gym.spaces.Dict(action=Nowhere.action_space),
    )
    shapes = {key: space.shape for key, space in observations.items()}
    actor = FlattenConcatPolicyNet(shapes, {"action": (4,)}, [16, 16], nn.ReLU)
    heads = [model.actor.mu, model.actor.log_std]
    for own, other in zip(layers_of(actor)[:-1], layers_of(model.actor.latent_pi), strict=True):
        own.load_state_dict(other.state_dict())
    with torch.no_grad():
        actor.heads[0].weight.copy_(torch.cat([head.weight for head in heads]))
        actor.heads[0].bias.copy_(torch.cat([head.bias for head in heads]))
    twins = []
    for source in model.critic.q_networks:
        twin = FlattenConcatStateActionValueNet({**shapes, "action": (2,)}, {"q_value": (1,)}, [16, 16], nn.ReLU)
        for own, other in zip(layers_of(twin), layers_of(source), strict=True):
            own.load_state_dict(other.state_dict())
        twins.append(twin)
    mapper = DistributionMapper(action_space, [{"action_space": "gym.spaces.Box", "distribution": SQUASHED}])
    critic = TorchStepStateActionCritic(
        {0: twins[0]}, 1, "cpu", {0: False}, {0: action_space}, twin_networks={0: twins[1]}
    )
    config = SACAlgorithmConfig(lr=0.01, gamma=0.9, tau=0.1, entropy_coef=0.0, entropy_tuning=False)
    maze_model = TorchActorCritic(TorchPolicy({0: actor}, mapper, "cpu"), critic, "cpu")
    learner = learner_of(maze_model, config, [ActorID(0, 0)])
    generator = torch.Generator().manual_seed(0)

    def of_both():
        yield from zip(layers_of(actor)[:-1], layers_of(model.actor.latent_pi), strict=True)
        for own_twins, other in ((critic.networks[0], model.critic), (critic.target_networks[0], model.critic_target)):
            yield from zip(layers_of(own_twins), layers_of(*other.q_networks), strict=True)

    before = [own.weight.detach().clone() for own, _ in of_both()]
    for _ in range(4):
        observed, following = (torch.randn(32, 3, generator=generator) for _ in range(2))
        actions = 2.0 * torch.rand(32, 2, generator=generator) - 1.0
        rewards, ended = torch.randn(32, 1, generator=generator), torch.rand(32, 1, generator=generator) < 0.3
        sample = ReplayBufferSamples(observed, actions, following, ended.float(), rewards)
        model.replay_buffer.sample = lambda *_, sample=sample, **__: sample
        model.train(gradient_steps=1, batch_size=32)
        learner.learn(
            TransitionBatch(
                actors=[ActorID(0, 0)],
                observations=[{"observation": observed}],
                actions=[{"action": actions}],
                rewards=rewards,
                next_observations=[{"observation": following}],
                terminated=ended.squeeze(1),
                n_substeps=None,
                has_next_step=None,
            )
        )
        for own, other in of_both():
            torch.testing.assert_close(own.weight, other.weight, rtol=0, atol=2e-4)
        torch.testing.assert_close(actor.heads[0].weight[:2], model.actor.mu.weight, rtol=0, atol=2e-4)
    assert min((own.weight - old).abs().max() for (own, _), old in zip(of_both(), before, strict=True)) > 0.001
