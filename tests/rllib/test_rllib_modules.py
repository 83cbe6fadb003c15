"""RLlib's view of Maze's distributions, networks and environments."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("ray.rllib.algorithms.ppo")
    from ray.rllib.core.columns import Columns

    from maze.rllib.algorithms import ALGORITHMS, SET_BY_RUNNER, configured, known_hyperparameters
    from maze.rllib.environment import EnvConfig, MazeMultiAgentEnv, MazeRLlibEnv, module_of_agent, unique_seed
    from maze.rllib.rl_module import (
        MODEL_KEY,
        ModuleConfig,
        PolicyGradientModule,
        QPolicyModule,
        SoftActorCriticModule,
        TargetPolicyModule,
        action_distribution_class,
        load_into_runner,
        require_finite,
    )
    from maze.rllib.training import MazeModel

from maze.core.env.base_env_events import BaseEnvEvents
from maze.core.env.structured_env import ActorID
from maze.core.errors import ConfigError, EnvironmentContractError, NonFiniteError
from maze.core.utils.config_utils import EnvFactory, read_config, read_hydra_config
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.core.wrappers.time_limit_wrapper import TimeLimitWrapper
from maze.distributions.distribution_mapper import DistributionMapper
from maze.train.trainers.common.observation_statistics import ObservationStatistics
from tests.interop.pettingzoo_envs import Duel
from tests.train.parallelization.toy_envs import TwoStepCoreEnv, two_step_env

pytestmark = pytest.mark.filterwarnings("ignore")

CONF = Path(__file__).resolve().parents[2] / "maze" / "conf"
HEADS = spaces.Dict(
    {
        "choice": spaces.Discrete(4),
        "choices": spaces.MultiDiscrete([2, 3]),
        "switches": spaces.MultiBinary(3),
        "free": spaces.Box(-np.inf, np.inf, (2,), np.float32),
        "beta": spaces.Box(-1.0, 2.0, (2,), np.float32),
        "squashed": spaces.Box(-1.0, 3.0, (1,), np.float32),
    }
)
MAPPING = [
    {"action_head": "beta", "distribution": "maze.distributions.beta.BetaProbabilityDistribution"},
    {
        "action_head": "squashed",
        "distribution": "maze.distributions.squashed_gaussian.SquashedGaussianProbabilityDistribution",
    },
]
MASKED = torch.finfo(torch.float32).min
N_LOGITS = 4 + 5 + 3 + 4 + 4 + 2


@pytest.fixture(scope="module")
def mapper() -> DistributionMapper:
    return DistributionMapper(HEADS, MAPPING)


def test_log_probabilities_entropies_and_divergences_are_those_of_maze(mapper: DistributionMapper) -> None:
    generator = torch.Generator().manual_seed(3)
    bound = action_distribution_class(mapper, HEADS)
    first, second = torch.randn(2, 7, N_LOGITS, generator=generator)
    distribution, other = bound.from_logits(first), bound.from_logits(second)
    maze = mapper.logits_dict_to_distribution(bound.split(first), 1.0)
    maze_other = mapper.logits_dict_to_distribution(bound.split(second), 1.0)
    actions = {head: action.clone() for head, action in maze.sample().items()}
    assert torch.equal(distribution.logp(actions), maze.joint_log_prob(actions))
    assert torch.equal(distribution.entropy(), maze.joint_entropy())
    assert torch.equal(distribution.kl(other), maze.joint_kl(maze_other))
    assert distribution.logp(actions).shape == (7,)
    assert set(distribution.sample()) == set(HEADS.spaces)
    likely, expected = distribution.to_deterministic().sample(), maze.deterministic_sample()
    assert all(torch.equal(likely[head], expected[head]) for head in HEADS.spaces)


def test_worker_and_learner_agree_on_the_probability_of_saturated_actions(mapper: DistributionMapper) -> None:
    bound = action_distribution_class(mapper, HEADS)
    logits = torch.full((50, N_LOGITS), 6.0)
    worker, learner = bound.from_logits(logits), bound.from_logits(logits)
    actions = worker.sample()
    assert torch.equal(worker.logp(actions), learner.logp({head: value.clone() for head, value in actions.items()}))


def test_split_is_the_inverse_of_join(mapper: DistributionMapper) -> None:
    bound = action_distribution_class(mapper, HEADS)
    logits = {head: torch.randn(5, *mapper.required_logits_shape(head)) for head in HEADS.spaces}
    again = bound.split(bound.join(logits))
    assert all(torch.equal(logits[head], again[head]) for head in HEADS.spaces)


def test_masked_actions_never_appear() -> None:
    space = spaces.Dict({"action": spaces.Discrete(3)})
    bound = action_distribution_class(DistributionMapper(space, []), space, "action")
    logits = torch.tensor([[0.0, MASKED, 0.0]]).expand(2000, 3)
    actions = bound.from_logits(logits).sample()
    assert set(actions.tolist()) == {0, 2}
    assert torch.isfinite(bound.from_logits(logits).kl(bound.from_logits(logits + 1.0 * (logits == 0)))).all()
    with pytest.raises(EnvironmentContractError, match="action"):
        bound.from_logits(torch.full((1, 3), MASKED)).sample()


# -- modules -----------------------------------------------------------------------------------------------------------


def module_config(critic: str = "flatten_concat_shared", env: str = "CartPole-v1", **options: Any) -> ModuleConfig:
    cfg = read_hydra_config("maze.conf", "conf_rllib", critic=critic, **{"env.name": env})
    maze_env = GymMazeEnv(env)
    spaces_dicts = {
        "action_spaces_dict": maze_env.action_spaces_dict,
        "observation_spaces_dict": maze_env.observation_spaces_dict,
        "agent_counts_dict": maze_env.agent_counts_dict,
    }
    from omegaconf import OmegaConf

    model = OmegaConf.to_container(cfg, resolve=True)["model"]
    model["critic"] = OmegaConf.to_container(cfg.critic)
    head = options.pop("only_head", None)
    return ModuleConfig(model, spaces_dicts, 0, head, options)


def built(module_class: type, config: ModuleConfig, inference_only: bool = False) -> Any:
    return module_class(
        observation_space=config.spaces_dicts["observation_spaces_dict"][0],
        action_space=config.spaces_dicts["action_spaces_dict"][0],
        inference_only=inference_only,
        model_config={MODEL_KEY: config},
    )


CASES = [
    (PolicyGradientModule, {}),
    (TargetPolicyModule, {}),
    (QPolicyModule, {"only_head": "action"}),
    (SoftActorCriticModule, {"critic": "flatten_concat_state_action", "only_head": "action"}),
]


@pytest.mark.parametrize(("module_class", "options"), CASES)
def test_weights_of_rllib_give_bit_equal_logits_in_a_maze_policy(module_class: type, options: dict) -> None:
    config = module_config(**options)
    module = built(module_class, config)
    model = maze_model(module_class, config)
    model.states()  # makes target networks
    policy = model.policy
    observations = torch.randn(6, 4)
    before = module.policy_outputs({"observation": observations})[0]
    assert not torch.equal(before, policy.networks[0]({"observation": observations})["action"])
    model.load({"default_policy": module.get_state()})
    assert torch.equal(before, policy.networks[0]({"observation": observations})["action"])


def maze_model(module_class: type, config: ModuleConfig) -> MazeModel:
    """A Maze model that loads the weights of a module."""
    composer = config.composer()
    module = built(module_class, replace(config, shared=composer))
    return MazeModel({"default_policy": module}, composer.policy, ObservationStatistics(composer.policy))


def test_rllib_starts_with_the_weights_of_the_model_including_targets() -> None:
    config = module_config()
    module = built(TargetPolicyModule, config)
    module.make_target_networks()
    model = maze_model(TargetPolicyModule, config)
    module.set_state(model.states()["default_policy"])
    expected = model.policy.networks[0].state_dict()
    for network in (module.policy_net, module.target_policy_net):
        assert all(torch.equal(value, expected[key]) for key, value in network.state_dict().items())


def test_statistics_of_observations_reach_learners_targets_and_workers_and_weights_stay() -> None:
    config = module_config()
    config = replace(config, model={**read_auto_model(), "critic": config.model["critic"]})
    learner, worker = built(TargetPolicyModule, config), built(TargetPolicyModule, config, inference_only=True)
    learner.make_target_networks()
    model = maze_model(TargetPolicyModule, config)
    model.states()
    statistics = model.statistics
    statistics.learn_from([{"observation": np.random.default_rng(0).normal(3.0, 2.0, (50, 4))}])
    part = model.buffers()["default_policy"]
    before = {name: value.clone() for name, value in learner.named_parameters()}
    learner.set_state(part)
    load_into_runner({"default_policy": part}, SimpleNamespace(module=worker))
    offset, scale = statistics.acting_buffers()
    for module, networks in ((learner, ("policy_net", "target_policy_net")), (worker, ("policy_net",))):
        state = module.state_dict()
        for network in networks:
            block = f"{network}.blocks.observation_RunningNormalizationBlock"
            assert torch.equal(state[f"{block}.offset"], offset)
            assert torch.equal(state[f"{block}.scale"], scale)
    assert all(torch.equal(value, before[name]) for name, value in learner.named_parameters())
    (block,) = statistics._blocks["observation"]
    mean = block.mean.clone()
    model.load({"default_policy": learner.get_state()})  # its statistics are rounded
    assert torch.equal(block.mean, mean)


def read_auto_model() -> dict[str, Any]:
    from omegaconf import OmegaConf

    cfg = read_hydra_config("maze.conf", "conf_rllib", model="auto", **{"env.name": "CartPole-v1"})
    found: Any = OmegaConf.to_container(cfg, resolve=True)
    return {**found["model"], "normalize_observations": True}


def test_values_are_those_of_the_critic() -> None:
    module = built(PolicyGradientModule, module_config())
    observations = torch.randn(5, 4)
    values = module.compute_values({Columns.OBS: {"observation": observations}})
    expected = module.critic_net({"observation": observations})["value"].squeeze(-1)
    assert values.shape == (5,)
    assert torch.equal(values, expected)


def test_workers_hold_no_critic() -> None:
    module = built(PolicyGradientModule, module_config(), inference_only=True)
    assert not [key for key in module.get_state() if key.startswith("critic_net")]


def test_dqn_explores_among_allowed_actions_only(monkeypatch: pytest.MonkeyPatch) -> None:
    module = built(QPolicyModule, module_config(only_head="action", epsilon=1.0))
    monkeypatch.setattr(module, "_values", lambda batch: torch.tensor([[MASKED, -3.0]]).expand(500, 2))
    assert module._forward_exploration({}, t=0)[Columns.ACTIONS].tolist() == [1] * 500


def test_a_state_critic_is_refused_for_sac() -> None:
    with pytest.raises(ConfigError, match="critic=flatten_concat_state_action"):
        built(SoftActorCriticModule, module_config(only_head="action"))


def test_weights_that_are_not_finite_are_named() -> None:
    with pytest.raises(NonFiniteError, match=r"iteration 3.*policy_net\.w"):
        require_finite({"default_policy": {"policy_net.w": np.array([0.0, np.nan], np.float32)}}, "iteration 3")


# -- hyperparameters ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_hyperparameter_of_the_option_is_known_to_rllib(name: str) -> None:
    values = read_config(CONF / "rllib" / "algorithm" / f"{name.lower()}.yaml")["config"]
    config = configured(name, values)
    assert set(values) <= set(known_hyperparameters(config))
    assert config.gamma == values["gamma"]


def test_an_unknown_hyperparameter_is_an_error_with_its_key() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.config\.clip_parm.*Did you mean `clip_param`"):
        configured("PPO", {"clip_parm": 0.1})


@pytest.mark.parametrize("key", SET_BY_RUNNER)
def test_settings_of_maze_override_those_of_rllib(key: str) -> None:
    with pytest.raises(ConfigError, match=r"set .* instead"):
        configured("PPO", {key: 1})


# -- environments ------------------------------------------------------------------------------------------------------


class Limited:
    """Makes CartPole with a time limit of three steps."""

    def __call__(self) -> Any:
        return TimeLimitWrapper.wrap(GymMazeEnv("CartPole-v1"), max_episode_steps=3)


def test_a_time_limit_arrives_as_truncated_and_a_fall_as_terminated() -> None:
    env = MazeRLlibEnv({"maze": EnvConfig(Limited(), seed=1)})
    env.reset(seed=5)
    ends = [env.step({"action": np.int64(0)})[2:4] for _ in range(3)]
    assert ends == [(False, False), (False, False), (False, True)]
    falling = MazeRLlibEnv({"maze": EnvConfig(EnvFactory(lambda: GymMazeEnv("CartPole-v1")), seed=1)})
    falling.reset(seed=5)
    end = (False, False)
    while not any(end):
        end = falling.step({"action": np.int64(0)})[2:4]
    assert end == (True, False)


def test_statistics_of_finished_episodes_are_sent_to_the_learner() -> None:
    env = MazeRLlibEnv({"maze": EnvConfig(Limited(), seed=1, is_single_action=True)})
    assert env.action_space == spaces.Discrete(2)
    env.reset(seed=5)
    for _ in range(3):
        env.step(np.int64(0))
    env.reset()
    (episode,), _ = env.monitored.take()
    assert 3.0 in episode.values()
    assert env.monitored.take() == ([], None)


def test_statistics_of_acted_on_observations_are_sent_to_the_learner() -> None:
    env = MazeRLlibEnv({"maze": EnvConfig(Limited(), seed=1, is_single_action=True, normalized=("observation",))})
    seen = []
    for _ in range(2):
        seen.append(env.reset(seed=5)[0]["observation"])
        seen += [env.step(np.int64(0))[0]["observation"] for _ in range(3)][:2]  # no action follows the last one
    count, mean, variance = env.monitored.take()[1]["observation"]
    assert count == 6
    np.testing.assert_allclose(mean, np.mean(seen, 0, dtype=float), rtol=1e-9)
    np.testing.assert_allclose(variance, np.var(seen, 0, dtype=float), rtol=1e-6, atol=1e-12)
    assert env.monitored.take()[1] is None


def test_environments_of_different_workers_have_different_seeds() -> None:
    seeds = {unique_seed(7, worker, 100 + worker + index) for worker in range(3) for index in range(4)}
    assert len(seeds) == 12
    assert unique_seed(7, 1, 101) == unique_seed(7, 1, 101)


@pytest.fixture
def structured() -> MazeMultiAgentEnv:
    cfg = read_hydra_config("maze.conf", "conf_rllib", env="tutorial_cutting_2d_struct", wrappers="tutorial_cutting_2d")
    return MazeMultiAgentEnv({"maze": EnvConfig(EnvFactory(cfg.env, cfg.wrappers), seed=1)})


def test_actors_of_a_structured_environment_take_turns(structured: MazeMultiAgentEnv) -> None:
    observations, _ = structured.reset(seed=3)
    total, n_steps, actors = 0.0, 0, []
    ends: dict[str, bool] = {"__all__": False}
    truncations: dict[str, bool] = {"__all__": False}
    while not ends["__all__"] and not truncations["__all__"]:
        (agent,) = observations
        actors.append(agent)
        assert structured.observation_spaces[agent].contains(observations[agent])
        action = structured.action_spaces[agent].sample()
        observations, rewards, ends, truncations, _ = structured.step({agent: action})
        total += sum(rewards.values())
        n_steps += 1
    assert actors[:4] == ["0:0", "1:0", "0:0", "1:0"]
    # a time limit cuts this environment off; RLlib continues the value of everybody who acted
    assert truncations["__all__"]
    assert set(observations) == {"0:0", "1:0"}
    structured.maze_env.reset()
    (episode,), _ = structured.monitored.take()
    rewards_of_episode = [value for key, value in episode.items() if key.event is BaseEnvEvents.reward]
    assert total in rewards_of_episode  # what actors earn is what the environment gives


def test_a_reward_caused_by_another_agents_move_reaches_the_agent() -> None:
    env = MazeMultiAgentEnv({"maze": EnvConfig(EnvFactory(Duel), seed=1)})
    observations, _ = env.reset()
    returns = dict.fromkeys(env.possible_agents, 0.0)
    for choice in (1, 1, 0):  # 2, 4, 5: the first player begins a step in which the second one does not act
        (agent,) = observations
        observations, rewards, ends, _, _ = env.step({agent: {"action": choice}})
        for name, reward in rewards.items():
            returns[name] += reward
    assert ends["__all__"]
    assert returns == {"player:0": 1.0, "player:1": -1.0}


class OwnRewardsCoreEnv(TwoStepCoreEnv):
    """Each sub-step has the reward of its actor, which is also its share of the step."""

    def step(self, maze_action: Any) -> Any:
        state, _, done, info = super().step(maze_action)
        return state, float(self.get_actor_rewards()[int(self.actor.step_key == "choose")]), done, info


def test_rewards_of_sub_steps_that_are_shares_count_once() -> None:
    def make() -> Any:
        env = two_step_env()
        env.core_env = OwnRewardsCoreEnv(3)
        return env

    env = MazeMultiAgentEnv({"maze": EnvConfig(EnvFactory(make), seed=1)})
    env.reset()
    first, second = (env.step({agent: env.action_spaces[agent].sample()})[1] for agent in ("choose:0", "cut:0"))
    choice = env.maze_env.core_env.choice
    assert first == {"choose:0": 0.0}  # shares are known when the step is complete
    assert second == {"choose:0": float(choice), "cut:0": 10.0}


class LeavingCoreEnv(TwoStepCoreEnv):
    """The first actor leaves after its first action; the episode is cut off while the second one goes on."""

    has_left = False

    def step(self, maze_action: Any) -> Any:
        state, reward, done, info = super().step(maze_action)
        self.has_left = self.actor.step_key == "cut"  # it was the first one's action
        self.actor = ActorID("cut", 0)
        return state, reward, done, {"TimeLimit.truncated": True} if done else info

    def is_actor_done(self) -> bool:
        return self.has_left


def test_an_agent_that_has_left_is_not_continued_after_a_truncation() -> None:
    def make() -> Any:
        env = two_step_env()
        env.core_env = LeavingCoreEnv(2)
        return env

    env = MazeMultiAgentEnv({"maze": EnvConfig(EnvFactory(make), seed=1)})
    for _ in range(2):  # a second episode begins anew
        env.reset()
        steps = [env.step({agent: env.action_spaces[agent].sample()}) for agent in ("choose:0", "cut:0", "cut:0")]
        assert [terminated for _, _, terminated, _, _ in steps[:2]] == [{"__all__": False}] * 2
        observations, _, terminated, truncated, _ = steps[2]
        assert set(observations) == {"choose:0", "cut:0"}
        assert (terminated, truncated) == ({"__all__": False, "choose:0": True}, {"__all__": True})


def test_agents_of_a_sub_step_share_its_network_unless_they_have_their_own() -> None:
    assert module_of_agent([], "0:2") == module_of_agent([], "0:1") == "step_0"
    assert module_of_agent([0], "0:2") == "agent_0_2"
