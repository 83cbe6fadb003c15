"""Policy bundles: content, acting, dependencies."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from maze.core.env.structured_env import ActorID
from maze.core.errors import ConfigError, EnvironmentContractError, NonFiniteError
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.maze_cli import main
from maze.serve.bundle import PolicyBundle
from tests.serve.conftest import policy_for

STATE = [0.01, -0.2, 0.03, 0.4]
HEAVY = ("torch", "hydra", "omegaconf", "gymnasium", "pandas", "matplotlib", "tensorboard", "onnx", "scipy")


@pytest.fixture(scope="module")
def bundle(cartpole_bundle: Path) -> PolicyBundle:
    return PolicyBundle.load(cartpole_bundle)


def test_a_bundle_loads_and_acts_without_torch_hydra_and_gymnasium(cartpole_bundle):
    code = f"""
import sys
import maze.serve, maze.serve.bundle
assert "onnxruntime" not in sys.modules
bundle = maze.serve.bundle.PolicyBundle.load({str(cartpole_bundle)!r})
action = bundle.session(seed=1).act({STATE}, deterministic=False)
assert type(action) is int
print(sorted(name for name in sys.modules if name in {HEAVY}))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_a_bundle_acts_as_its_policy_with_the_same_seed(bundle):
    env = GymMazeEnv("CartPole-v1")
    policy = policy_for(env)
    policy.seed(5)
    session = bundle.session(seed=5)
    env.seed(3)
    observation, is_done, n_steps, n_drawn = env.reset(), False, 0, 0
    while not is_done or n_steps < 40:
        if is_done:
            observation = env.reset()
            session.reset()
        state = env.get_maze_state()
        best = policy.compute_action(observation, deterministic=True)["action"]
        assert session.act(state) == best
        action = policy.compute_action(observation)
        assert session.act(state, deterministic=False) == action["action"]
        n_drawn += int(action["action"] != best)
        observation, _, is_done, _ = env.step(action)
        n_steps += 1
    assert n_drawn  # something was drawn at random


def test_a_batch_equals_single_observations(bundle):
    observations = np.random.default_rng(0).normal(size=(7, 4)).astype(np.float32)
    answer = bundle.act_batch(0, {"observation": observations}, ranked=2)
    session = bundle.session()
    assert answer.actions["action"].tolist() == [session.act(row) for row in observations]
    for row, ranked in enumerate(answer.ranked):
        odds = np.exp(answer.logits["action"][row].astype(float))
        assert [choice["action"] for choice, _ in ranked] == np.argsort(-odds).tolist()
        np.testing.assert_allclose([p for _, p in ranked], sorted(odds / odds.sum(), reverse=True), rtol=1e-6)


def test_rows_sample_from_their_own_generators_independently_of_the_batch(bundle):
    observations = np.zeros((3, 4), np.float32)

    def drawn(rows: list[int]) -> list[list[int]]:
        rngs = {row: np.random.default_rng(row) for row in rows}
        return [
            bundle.act_batch(0, {"observation": observations[rows]}, deterministic=False, rngs=list(rngs.values()))
            .actions["action"].tolist()
            for _ in range(20)
        ]  # fmt: skip

    assert [actions[1] for actions in drawn([0, 1, 2])] == [actions[0] for actions in drawn([1])]


def test_temperature_sharpens_and_flattens(bundle):
    many = {"observation": np.zeros((2000, 4), np.float32)}
    logits = bundle.act_batch(0, {"observation": np.zeros((1, 4))}).logits["action"][0].astype(float)
    for temperature in (0.3, 1.0, 5.0):
        odds = np.exp(logits / temperature)
        rng = np.random.default_rng(1)
        answer = bundle.act_batch(0, many, deterministic=False, rngs=rng, temperature=temperature)
        share = odds[1] / odds.sum()
        assert answer.actions["action"].mean() == pytest.approx(share, abs=4 * np.sqrt(share * (1 - share) / 2000))


def test_the_card_is_json_with_spaces_versions_and_results(bundle):
    card = json.loads(json.dumps(bundle.card, allow_nan=False))
    assert card["name"] == "test"
    assert card["environment"] == "GymMazeEnv(GymCoreEnv(CartPole-v1))"
    assert card["exported_with"]["torch"] == torch.__version__
    (step,) = card["steps"]
    assert step["observation_space"]["observation"]["shape"] == [4]
    assert step["observation_space"]["observation"]["low"][1] is None  # unbounded
    assert step["heads"]["action"]["n"] == 2
    assert card["code"] == []


def test_saving_changes_nothing(bundle, cartpole_bundle, tmp_path):
    copy = PolicyBundle.load(cartpole_bundle)
    path = copy.save(tmp_path / "copy.maze")
    assert path.read_bytes() == cartpole_bundle.read_bytes()
    assert PolicyBundle.load(path).sha256 == bundle.sha256


def test_equal_policies_make_equal_files_but_for_the_time(exported, bundle):
    again = PolicyBundle(exported(GymMazeEnv("CartPole-v1")))
    assert {**again.card, "created": ""} == {**bundle.card, "created": ""}
    assert again.drift == bundle.drift


@pytest.mark.parametrize(
    ("observation", "error", "text"),
    [
        ([0.0] * 5, EnvironmentContractError, r"`observation`: expected numbers of shape \(4,\), found \(5,\)"),
        ({"observation": [0.0] * 4}, EnvironmentContractError, r"of shape \(4,\), found \{.observation.: \["),
        ([0.0] * 1_000_000, EnvironmentContractError, r"found \(1000000,\)"),
        ([[1.0], [1.0, 2.0]], EnvironmentContractError, "expected numbers"),
        (["a", "b", "c", "d"], EnvironmentContractError, "expected numbers"),
        (None, EnvironmentContractError, "expected numbers of shape"),
        ([0.0, np.nan, 0.0, 0.0], NonFiniteError, "not finite"),
        ([0.0, 1e60, 0.0, 0.0], NonFiniteError, "not finite"),
    ],
)
def test_observations_that_are_none_are_refused(bundle, observation, error, text):
    with pytest.raises(error, match=text):
        bundle.session().act(observation)
    if isinstance(observation, list) and len(observation) == 1_000_000:
        with pytest.raises(error, match="network takes"):
            bundle.act_batch(0, {"observation": [observation]})


def test_missing_files_and_keys_are_named(bundle):
    with pytest.raises(ConfigError, match=r"sub-step 'x' is unknown.*Known: 0"):
        bundle.act_batch("x", {"observation": np.zeros((1, 4))})
    with pytest.raises(EnvironmentContractError, match="the input `observation` is missing"):
        bundle.act_batch(0, {"obs": np.zeros((1, 4))})
    rngs = [np.random.default_rng(0)]
    with pytest.raises(ConfigError, match="2 rows need as many generators, found 1"):
        bundle.act_batch(0, {"observation": np.zeros((2, 4))}, deterministic=False, rngs=rngs)


def test_a_run_is_exported_by_a_command(trained_run, tmp_path, capfd):
    path = tmp_path / "policy.maze"
    assert main(["--export", str(trained_run), "--out", str(path), "--steps", "50"]) == 0
    said = capfd.readouterr().out
    bundle = PolicyBundle.load(path)
    assert bundle.sha256 in said
    assert "from observation to action" in said
    assert bundle.card["evaluation"]["statistics"]["BaseEnvEvents/reward/episode_count"] == 1
    assert bundle.card["versions"]["maze-rl"]
    from maze.core.agent_deployment.agent_deployment import AgentDeployment

    with AgentDeployment.from_run(trained_run, deterministic=True) as deployment:
        expected = [deployment.act(np.float32(STATE) * scale, 0, False, {}) for scale in (1, -1, 3, -5)]
    session = bundle.session()
    assert [session.act(np.float32(STATE) * scale) for scale in (1, -1, 3, -5)] == expected


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--export"], "the following arguments are required: run"),
        (["--export", "nowhere"], "nowhere is not the directory of a run"),
        (["--export", "{run}", "--steps", "many"], "argument --steps: invalid int value: 'many'"),
        (["--export", "{run}", "--steps", "0"], "n_steps (--steps): expected a whole number of at least 1, found 0"),
        (["--export", "{run}", "--onnx"], "--export: unrecognized arguments: --onnx"),
        (["--export", "{run}", "--out"], "argument --out: expected one argument"),
        (["--export", "{run}", "--out", "{run}/no/where.maze"], "there is no directory"),
    ],
)
def test_contradictory_commands_report_the_reason(trained_run, arguments, text, capfd):
    before = sorted(trained_run.iterdir())
    assert main([each.format(run=trained_run) for each in arguments]) != 0
    error = capfd.readouterr().err
    assert text in error
    assert "Traceback" not in error
    assert sorted(trained_run.iterdir()) == before


def test_actors_are_identified_by_order_or_name(bundle):
    assert bundle.actor_sequence == [(0, 0)]
    session = bundle.session()
    assert session.act(STATE) == session.act(STATE, ActorID(0, 0)) == session.act(STATE, (0, 0))


def test_threads_that_share_a_bundle_sample_as_one_thread_does(bundle):
    observation = {"observation": np.zeros((256, 4), np.float32)}

    def sampled(seed: int) -> np.ndarray:
        rngs = np.random.default_rng(seed)
        return np.stack(
            [bundle.act_batch(0, observation, deterministic=False, rngs=rngs).actions["action"] for _ in range(100)]
        )

    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(sampled, range(8)))
    np.testing.assert_array_equal(together, [sampled(seed) for seed in range(8)])
