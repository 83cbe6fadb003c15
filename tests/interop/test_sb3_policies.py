"""Models of stable-baselines3 act in Maze, and Maze's policies answer as such models do."""

from __future__ import annotations

import json
import zipfile

import gymnasium
import numpy as np
import pytest
import stable_baselines3 as sb3
import torch
from gymnasium import spaces
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize
from torch import nn

from maze.core.agent.policy import Policy
from maze.core.agent.random_policy import RandomPolicy
from maze.core.errors import CheckpointError, ConfigError, EnvironmentContractError
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.core.wrappers.no_dict_action_wrapper import NoDictActionWrapper
from maze.core.wrappers.no_dict_spaces_wrapper import NoDictSpacesWrapper
from maze.interop import to_gymnasium, to_sb3
from maze.interop.sb3_policy import SB3Policy
from maze.maze_cli import main


def plain(name="CartPole-v1"):
    return to_gymnasium(NoDictSpacesWrapper.wrap(GymMazeEnv(name)))


def acting(path, name="CartPole-v1", **arguments):
    env = GymMazeEnv(name)
    return SB3Policy(path, env.observation_spaces_dict, env.action_spaces_dict, **arguments)


class OwnActivation(nn.Tanh):
    pass


MODELS = {
    "ppo": lambda env: sb3.PPO("MlpPolicy", env, seed=1, device="cpu"),
    "a2c": lambda env: sb3.A2C("MlpPolicy", env, seed=1, device="cpu", policy_kwargs={"net_arch": [8]}),
    "a2c relu": lambda env: sb3.A2C("MlpPolicy", env, device="cpu", policy_kwargs={"activation_fn": nn.ReLU}),
    "dqn": lambda env: sb3.DQN("MlpPolicy", env, seed=1, device="cpu", buffer_size=10),
    "ppo of own classes": lambda env: sb3.PPO(
        "MlpPolicy", env, device="cpu", policy_kwargs={"activation_fn": OwnActivation}
    ),
}
CONTINUOUS = {
    "sac": lambda env: sb3.SAC("MlpPolicy", env, seed=1, device="cpu", buffer_size=10),
    "td3": lambda env: sb3.TD3("MlpPolicy", env, seed=1, device="cpu", buffer_size=10),
    "ppo": lambda env: sb3.PPO("MlpPolicy", env, seed=1, device="cpu", use_sde=True),
}


@pytest.fixture
def saved(tmp_path):
    def save(name, env=None):
        model = MODELS[name](plain() if env is None else env)
        model.save(tmp_path / "model.zip")
        return model, tmp_path / "model.zip"

    return save


def same_actions(model, policy, name="CartPole-v1", n=5):
    env = GymMazeEnv(name)
    env.seed(1)
    for _ in range(n):
        observation = env.reset()
        expected, _ = model.predict(observation["observation"], deterministic=True)
        np.testing.assert_array_equal(policy.compute_action(observation, deterministic=True)["action"], expected)


@pytest.mark.parametrize("name", ["ppo", "a2c", "a2c relu", "dqn"])
def test_a_model_acts_as_it_does_there_without_its_pickles_being_loaded(name, saved, monkeypatch):
    model, path = saved(name)
    for module in ("cloudpickle", "pickle"):
        monkeypatch.setattr(f"{module}.loads", lambda *_: pytest.fail("a pickle was loaded"))
    same_actions(model, acting(path))


@pytest.mark.parametrize("name", CONTINUOUS)
def test_continuous_actions_are_those_of_the_model(name, tmp_path):
    model = CONTINUOUS[name](plain("Pendulum-v1"))
    model.save(tmp_path / "model.zip")
    same_actions(model, acting(tmp_path / "model.zip", "Pendulum-v1"), "Pendulum-v1")


def test_a_model_of_dictionaries_observes_its_entries(tmp_path):
    env = to_gymnasium(NoDictActionWrapper.wrap(GymMazeEnv("CartPole-v1")))
    model = sb3.PPO("MultiInputPolicy", env, seed=1, device="cpu")
    model.save(tmp_path / "model.zip")
    observation = GymMazeEnv("CartPole-v1").reset()
    expected, _ = model.predict(observation, deterministic=True)
    assert acting(tmp_path / "model.zip").compute_action(observation, deterministic=True)["action"] == expected


def test_observations_are_normalized_as_in_the_training_of_the_model(tmp_path):
    vec_env = VecNormalize(DummyVecEnv([lambda: gymnasium.make("Pendulum-v1")]))
    model = sb3.PPO("MlpPolicy", vec_env, seed=1, device="cpu", n_steps=64).learn(64)
    model.save(tmp_path / "model.zip")
    vec_env.save(str(tmp_path / "normalize.pkl"))
    with pytest.raises(CheckpointError, match=r"normalize\.pkl.*allow_pickle"):
        acting(tmp_path / "model.zip", "Pendulum-v1", normalization=tmp_path / "normalize.pkl")
    both = {"normalization": tmp_path / "normalize.pkl", "allow_pickle": True}
    policy, plain_policy = (acting(tmp_path / "model.zip", "Pendulum-v1", **kwargs) for kwargs in (both, {}))
    observation = np.array([0.6, 0.8, -2.0], np.float32)
    expected = model.predict(vec_env.normalize_obs(observation), deterministic=True)[0]
    found, other = (
        each.compute_action({"observation": observation}, deterministic=True) for each in (policy, plain_policy)
    )
    np.testing.assert_allclose(found["action"], expected, rtol=1e-6)
    assert not np.allclose(other["action"], expected)


def test_classes_outside_of_maze_need_trust(saved):
    model, path = saved("ppo of own classes")
    with pytest.raises(CheckpointError, match=r"OwnActivation.*set policy\.allow_pickle=true"):
        acting(path)
    same_actions(model, acting(path, allow_pickle=True))


def test_actions_are_sampled_from_the_policys_own_generator(saved):
    _, path = saved("ppo")
    policy, observation = acting(path), GymMazeEnv("CartPole-v1").reset()

    def drawn(seed):
        policy.seed(seed)
        return [int(policy.compute_action(observation)["action"]) for _ in range(30)]

    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    assert drawn(1) == drawn(1) != drawn(2)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        (b"<html>", "is not a model saved by model.save"),
        ({"data": b"{}"}, "is not a model saved by model.save"),
    ],
)
def test_other_files_are_refused(tmp_path, content, message):
    path = tmp_path / "model.zip"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        with zipfile.ZipFile(path, "w") as archive:
            for name, text in content.items():
                archive.writestr(name, text)
    with pytest.raises(CheckpointError, match=message):
        acting(path)


@pytest.mark.parametrize(
    ("module", "owner", "message"),
    [
        ("os", "system", "allow_pickle"),
        ("stable_baselines3.common.utils", "set_random_seed", "is not a class of networks"),
    ],
)
def test_a_class_named_by_a_file_is_called_only_if_it_is_a_policy(saved, tmp_path, module, owner, message):
    _, path = saved("ppo")
    forged = tmp_path / "forged.zip"
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(forged, "w") as target:
        for name in source.namelist():
            content = source.read(name)
            if name == "data":
                data = json.loads(content)
                data["policy_class"] |= {"__module__": module, "__init__": f"<function {owner}.__init__ at 0x1>"}
                content = json.dumps(data).encode()
            target.writestr(name, content)
    with pytest.raises(CheckpointError, match=message):
        acting(forged)


def test_model_of_another_environment_is_refused(saved):
    _, path = saved("ppo")
    with pytest.raises(CheckpointError, match="does not fit this environment"):
        acting(path, "Pendulum-v1")


def test_rollouts_and_comparisons_accept_a_stable_baselines3_model(saved, tmp_path, monkeypatch, capfd):
    saved("ppo")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["maze-run"])
    arguments = ["env.name=CartPole-v1", "runner.n_episodes=2"]
    assert not main([*arguments, "policy=sb3", "policy.path=model.zip", "runner=sequential"])
    assert not main(["-cn", "conf_compare", "policies=[random,model.zip]", *arguments])
    assert "model" in capfd.readouterr().out


# -- Maze's policies as such models ------------------------------------------------------------------------------------


def test_evaluate_policy_gives_what_a_maze_evaluation_gives(trained_run):
    from stable_baselines3.common.evaluation import evaluate_policy

    predictor = to_sb3(trained_run)
    rewards, lengths = evaluate_policy(predictor, plain(), n_eval_episodes=3, return_episode_rewards=True, warn=False)
    assert rewards == lengths  # CartPole gives 1 for each step


def test_observations_of_one_environment_and_of_several_give_the_same_actions(trained_run):
    predictor = to_sb3(trained_run)
    observations = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
    actions, state = predictor.predict(observations, deterministic=True)
    assert actions.shape == (6,)
    assert state is None
    assert [predictor.predict(row, deterministic=True)[0] for row in observations] == actions.tolist()
    as_entries, _ = predictor.predict({"observation": observations}, deterministic=True)
    np.testing.assert_array_equal(as_entries, actions)


def test_actions_are_dictionaries_where_the_environment_takes_them():
    env = GymMazeEnv("CartPole-v1")
    policy = RandomPolicy(env.action_spaces_dict)
    exported = to_gymnasium(env)
    predictor = to_sb3(policy, exported)
    observation, _ = exported.reset(seed=1)
    action, _ = predictor.predict(observation)
    assert exported.action_space.contains(action)
    actions, _ = predictor.predict({"observation": np.zeros((3, 4), np.float32)})
    assert [sorted(each) for each in actions] == [["action"]] * 3


def test_the_recurrent_state_is_returned():
    predictor = to_sb3(RandomPolicy(GymMazeEnv("CartPole-v1").action_spaces_dict), plain())
    state = (np.zeros(2),)
    assert predictor.predict(np.zeros(4, np.float32), state=state, episode_start=np.ones(1, bool))[1] is state


@pytest.mark.parametrize(
    ("observation", "message"),
    [
        (np.zeros((2, 3)), r"in the shape \(4,\).*found \(2, 3\)"),
        ({"position": np.zeros(4)}, "`?observation`? is missing"),
    ],
)
def test_observations_that_do_not_fit_are_named(observation, message):
    predictor = to_sb3(RandomPolicy(GymMazeEnv("CartPole-v1").action_spaces_dict), plain())
    with pytest.raises(EnvironmentContractError, match=message):
        predictor.predict(observation)


class Looking(Policy):
    def needs_env(self):
        return True

    def compute_action(self, observation, maze_state, env, actor_id=None, deterministic=False):
        return {"action": 0}


def test_policies_that_require_more_than_observations_are_refused():
    with pytest.raises(ConfigError, match="Looking needs the environment"):
        to_sb3(Looking(), plain())


def test_a_policy_needs_its_environment():
    with pytest.raises(ConfigError, match="name the environment"):
        to_sb3(RandomPolicy(GymMazeEnv("CartPole-v1").action_spaces_dict))


class Bounded(gymnasium.Env):
    """Actions are counted from 2, or bounded."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)

    def __init__(self, action_space):
        self.action_space = action_space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        assert self.action_space.contains(action)
        return np.zeros(2, np.float32), 1.0, True, False, {}


class Extreme(Policy):
    """Draws far outside of the bounds."""

    def seed(self, seed): ...
    def needs_state(self):
        return False

    def compute_action(self, observation, maze_state=None, env=None, actor_id=None, deterministic=False):
        return {"action": np.array([-50.0, 50.0], np.float32)}

    def compute_top_action_candidates(self, *args, **kwargs):
        raise NotImplementedError


@pytest.mark.parametrize("exported", [False, True])
def test_continuous_actions_are_clipped_to_the_action_space(exported):
    env = Bounded(spaces.Box(-1, 2, (2,), np.float32))
    acted_in = to_gymnasium(NoDictSpacesWrapper.wrap(GymMazeEnv(env))) if exported else env
    predictor = to_sb3(Extreme(), acted_in)
    observations = np.zeros((3, 2), np.float32)
    assert predictor.predict(observations)[0].tolist() == [[-1.0, 2.0]] * 3
    assert env.action_space.contains(predictor.predict(observations[0])[0])


def test_discrete_actions_are_numbered_as_in_their_environment():
    env = Bounded(spaces.Discrete(3, start=2))
    policy = RandomPolicy(GymMazeEnv(env).action_spaces_dict)
    observations = np.zeros((60, 2), np.float32)
    assert set(to_sb3(policy, env).predict(observations)[0]) == {2, 3, 4}
    exported = to_gymnasium(NoDictSpacesWrapper.wrap(GymMazeEnv(env)))
    assert set(to_sb3(policy, exported).predict(observations)[0]) == {0, 1, 2}


def test_a_policy_for_other_actions_than_those_of_the_environment_is_refused(trained_run):
    with pytest.raises(ConfigError, match=r"to_sb3: the policy chooses .* Bounded takes"):
        to_sb3(trained_run, Bounded(spaces.Box(-1, 2, (2,), np.float32)))


# -- sb3-contrib -------------------------------------------------------------------------------------------------------


class Masked(gymnasium.Env):
    """Only one of three actions is valid, a different one in each step."""

    observation_space = spaces.Dict({"observation": spaces.Box(0, 3, (1,)), "action_mask": spaces.MultiBinary(3)})
    action_space = spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.valid = 0
        return self._seen(), {}

    def step(self, action):
        is_valid = action == self.valid
        self.valid = (self.valid + 2) % 3
        return self._seen(), float(is_valid), False, False, {}

    def _seen(self):
        mask = np.zeros(3, np.int8)
        mask[self.valid] = 1
        return {"observation": np.array([self.valid], np.float32), "action_mask": mask}


def test_masks_reach_maskable_policies_in_training_and_in_maze(tmp_path):
    contrib = pytest.importorskip("sb3_contrib")
    from sb3_contrib.common.maskable.utils import get_action_masks, is_masking_supported

    exported = to_gymnasium(NoDictActionWrapper.wrap(GymMazeEnv(Masked())))
    model = contrib.MaskablePPO("MultiInputPolicy", exported, n_steps=8, batch_size=8, seed=1, device="cpu")
    assert is_masking_supported(model.env)
    model.learn(8)
    assert get_action_masks(model.env).shape == (1, 3)
    assert not is_masking_supported(sb3.PPO("MlpPolicy", plain(), device="cpu").env)
    model.save(tmp_path / "model.zip")
    env = GymMazeEnv(Masked())
    policy = SB3Policy(tmp_path / "model.zip", env.observation_spaces_dict, env.action_spaces_dict)
    observation, total = env.reset(), 0.0
    for _ in range(9):
        actions, probabilities = policy.compute_top_action_candidates(observation, None, None, None)
        assert probabilities[0] == pytest.approx(1.0)
        assert actions[0]["action"] == env.core_env.env.unwrapped.valid
        observation, reward, _, _ = env.step(policy.compute_action(observation))
        total += reward
    assert total == 9.0


def test_recurrent_policies_restart_when_seeded(tmp_path):
    contrib = pytest.importorskip("sb3_contrib")
    model = contrib.RecurrentPPO("MlpLstmPolicy", plain("Pendulum-v1"), n_steps=8, batch_size=8, seed=1, device="cpu")
    model.save(tmp_path / "model.zip")
    policy = acting(tmp_path / "model.zip", "Pendulum-v1")
    observation = {"observation": np.ones(3, np.float32)}

    def episode():
        policy.seed(0)
        return [policy.compute_action(observation, deterministic=True)["action"].item() for _ in range(3)]

    first = episode()
    state, expected = None, []
    for _ in range(3):
        start = np.array([state is None])
        action, state = model.predict(observation["observation"], state, start, deterministic=True)
        expected.append(action.item())
    assert first == pytest.approx(expected)
    assert len(set(first)) == 3
    assert episode() == first


def test_recurrent_states_are_those_of_an_environment_and_its_episode(tmp_path):
    contrib = pytest.importorskip("sb3_contrib")
    model = contrib.RecurrentPPO("MlpLstmPolicy", plain("Pendulum-v1"), n_steps=8, batch_size=8, seed=1, device="cpu")
    model.save(tmp_path / "model.zip")
    policy, envs = acting(tmp_path / "model.zip", "Pendulum-v1"), [GymMazeEnv("Pendulum-v1") for _ in range(2)]
    assert policy.needs_env()
    observation = {"observation": np.ones(3, np.float32)}

    def act(env):
        return policy.compute_action(observation, env=env, deterministic=True)["action"].item()

    policy.seed(0)
    for env in envs:
        env.reset()
    alternating = [[act(env) for env in envs] for _ in range(3)]
    envs[1].reset()
    assert act(envs[0]) not in np.ravel(alternating)
    assert [first for first, _ in alternating] == [second for _, second in alternating]
    assert act(envs[1]) == alternating[0][0]


@pytest.mark.parametrize("policy", ["LinearPolicy", "MlpPolicy"])
def test_a_model_of_ars_acts_as_it_does_in_stable_baselines3(policy, tmp_path):
    contrib = pytest.importorskip("sb3_contrib")
    model = contrib.ARS(policy, "Pendulum-v1", seed=1)
    with torch.no_grad():
        for parameter in model.policy.parameters():
            parameter.add_(0.3)
    model.save(tmp_path / "model.zip")
    env = GymMazeEnv("Pendulum-v1")
    observation = env.reset()
    action = acting(tmp_path / "model.zip", "Pendulum-v1").compute_action(observation)["action"]
    np.testing.assert_array_equal(action, model.predict(observation["observation"])[0])
