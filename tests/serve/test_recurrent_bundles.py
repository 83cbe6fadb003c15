"""Bundles of recurrent policies: hidden states in sessions, batches, requests, shadows and logs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import onnx
import pytest
import torch
from hypothesis import given
from hypothesis.extra import numpy as arrays
from torch import nn

from benchmarks.bundle_equality import compared
from maze.core.agent.policy import acting_in
from maze.core.agent.torch_policy import TorchPolicy
from maze.core.agent_deployment.agent_deployment import AgentDeployment
from maze.core.env.maze_env import MazeEnv
from maze.core.errors import ConfigError, EnvironmentContractError, NonFiniteError
from maze.core.rollout.rollout_generator import RolloutGenerator
from maze.core.trajectory_recording.datasets.decision_data import read_lines
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.distributions.distribution_mapper import DistributionMapper
from maze.interop.sb3_policy import to_sb3
from maze.maze_cli import main
from maze.perception.blocks import DenseBlock, InferenceBlock, RecurrentCellBlock
from maze.serve.bundle import BundleError, PolicyBundle, replay_reference
from maze.serve.bundle_file import packed, unpacked
from maze.serve.client import PolicyClient, ServerError
from maze.serve.decision_log import DecisionLog, replay
from maze.serve.drift import DriftLimits
from maze.serve.export import export_policy
from maze.serve.policy import BundlePolicy
from maze.serve.served import Settings, as_json
from maze.train.parallelization.vector_env.sequential_vector_env import SequentialVectorEnv
from tests.serve.serving import cartpole, cartpole_observations, metrics_of, remembering, served
from tests.train.parallelization.toy_envs import two_step_env
from tests.train.trainers.common.recurrent_models import recurrent_model

KEY = "recurrence.state"
OBSERVATIONS = cartpole_observations(40)


@pytest.fixture(scope="module")
def bundle() -> PolicyBundle:
    return PolicyBundle(remembering())


def decided(bundle: PolicyBundle, observations: list[Any], seed: int | None = None) -> list[Any]:
    """An episode of a session."""
    session = bundle.session(seed)
    return [session.act(each, deterministic=seed is None) for each in observations]


# -- in this process --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_a_session_acts_as_the_policy_does_from_episode_to_episode(cell: str) -> None:
    env = GymMazeEnv("CartPole-v1")
    torch.manual_seed(0)
    memory = RecurrentCellBlock("observation", "memory", (4,), 6, cell)
    head = DenseBlock("memory", "action", (6,), [2], nn.Identity)
    network = InferenceBlock("observation", "action", (4,), {"memory": memory, "action": head})
    for parameter in network.parameters():
        parameter.data = torch.randn_like(parameter)
    policy = TorchPolicy({0: network}, DistributionMapper(env.action_space, {}), "cpu")
    bundle = PolicyBundle(export_policy(policy, env, n_steps=50))
    assert dict(bundle.steps[0].network().state_sizes) == policy.state_sizes(None)
    policy.seed(5)
    session = bundle.session(seed=5)
    env.seed(3)
    observation, n_episodes, drawn = env.reset(), 0, []
    while n_episodes < 3:
        state = env.get_maze_state()
        action = policy.compute_action(observation, env=env)
        assert session.act(state, deterministic=False) == action["action"]
        drawn.append(int(action["action"]))
        observation, _, is_done, _ = env.step(action)
        if is_done:
            observation, n_episodes = env.reset(), n_episodes + 1
            session.reset()
    assert set(drawn) == {0, 1}


def test_earlier_observations_change_the_decision(bundle: PolicyBundle) -> None:
    alone = [bundle.session().act(each) for each in OBSERVATIONS]
    assert decided(bundle, OBSERVATIONS) != alone


@pytest.mark.slow
def test_each_actor_of_an_environment_has_a_state_of_its_own(tmp_path: Path) -> None:
    env = two_step_env()
    policy = recurrent_model(env).policy
    path = tmp_path / "policy.maze"
    path.write_bytes(export_policy(policy, env, n_steps=60))
    found = []
    for each in (policy, BundlePolicy(path)):
        each.seed(1)
        record = RolloutGenerator(two_step_env()).rollout(each, 12)
        found.append([step for each in record.step_records for step in each.substep_records])
    for one, other in zip(*found, strict=True):
        assert one.actor_id == other.actor_id
        for head, action in one.action.items():
            np.testing.assert_allclose(other.action[head], action, rtol=1e-5, atol=1e-5)


def test_rows_of_a_batch_start_their_episodes_independently(bundle: PolicyBundle) -> None:
    rows = np.array(OBSERVATIONS, np.float32).reshape(10, 4, 4)  # [step, episode, entry]
    begins = np.zeros((10, 4), np.bool_)
    begins[0] = begins[3, 1] = begins[7, 2] = begins[8, 2] = True
    sessions = [bundle.session() for _ in range(4)]
    states = None
    for observations, starts in zip(rows, begins, strict=True):
        for session, begin in zip(sessions, starts, strict=True):
            if begin:
                session.reset()
        before = None if states is None else {key: array.copy() for key, array in states.items()}
        answer = bundle.act_batch(0, {"observation": observations}, states=states, episode_start=starts)
        assert before is None or (states[KEY] == before[KEY]).all(), "they are the caller's"
        states = answer.states
        expected = [session.act(row) for session, row in zip(sessions, observations, strict=True)]
        assert answer.actions["action"].tolist() == expected
        for index, session in enumerate(sessions):
            np.testing.assert_allclose(answer.states_of(index)[KEY], session.states[KEY], rtol=1e-5, atol=1e-6)


def test_sessions_are_decided_together_and_keep_their_states(bundle: PolicyBundle) -> None:
    sessions = [bundle.session() for _ in range(3)]
    for step in range(8):
        inputs = [each.prepare(OBSERVATIONS[3 * step + index]) for index, each in enumerate(sessions)]
        batch = {"observation": np.stack([each["observation"] for each in inputs if each])}
        states = {KEY: np.stack([each.states[KEY] for each in sessions])}
        answer = bundle.act_batch(0, batch, states=states)
        for index, session in enumerate(sessions):
            session.states = answer.states_of(index)
            session.finish(answer.row(index))
    alone = bundle.session()
    for step in range(8):
        alone.act(OBSERVATIONS[3 * step + 1])
    np.testing.assert_allclose(sessions[1].states[KEY], alone.states[KEY], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("given_states", "error", "text"),
    [
        ({}, ConfigError, "carries hidden states .* and none were passed. Pass the `states` of the previous answer"),
        ({"episode_start": [True, False]}, ConfigError, "none were passed"),
        ({"episode_start": [True]}, ConfigError, r"`episode_start` must hold true or false for 2 rows, found \[True\]"),
        ({"episode_start": "yes"}, ConfigError, "`episode_start` must hold true or false"),
        ({"states": {"other": np.zeros((2, 16))}}, ConfigError, r"carries \['recurrence.*found `states` \['other'\]"),
        ({"states": {KEY: np.zeros((2, 3))}}, ConfigError, r"has the shape \[2, 3\], expected \[2, 16\]"),
        ({"states": {KEY: np.zeros((1, 16))}}, ConfigError, r"has the shape \[1, 16\], expected \[2, 16\]"),
        ({"states": {KEY: "none"}}, ConfigError, r"has no numbers \(ValueError\)"),
        ({"states": {KEY: np.full((2, 16), np.nan)}}, NonFiniteError, "is not finite"),
    ],
)
def test_states_that_are_missing_or_are_none_are_refused_in_one_sentence(
    bundle: PolicyBundle, given_states: Mapping[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        bundle.act_batch(0, {"observation": np.zeros((2, 4))}, **given_states)


def test_feed_forward_policies_have_no_recurrent_states() -> None:
    bundle = PolicyBundle(cartpole())
    answer = bundle.act_batch(0, {"observation": np.zeros((2, 4))}, states=None, episode_start=True)
    assert answer.states == {}
    assert not bundle.is_recurrent
    with pytest.raises(ConfigError, match="the network carries no hidden states"):
        bundle.act_batch(0, {"observation": np.zeros((2, 4))}, states={KEY: np.zeros((2, 16))})


def test_hidden_states_are_in_the_card_and_in_the_onnx_graph(bundle: PolicyBundle) -> None:
    assert bundle.card["steps"][0]["hidden_states"] == {KEY: 16}
    content = unpacked(remembering(), "policy")[1]["networks/0.onnx"]
    graph = onnx.load_from_string(content).graph
    assert [each.name for each in graph.input] == ["observation/observation", f"state/{KEY}"]
    assert [each.name for each in graph.output] == ["logits/action", f"next_state/{KEY}"]


def test_bundle_with_other_recurrent_states_is_not_loaded() -> None:
    description, networks = unpacked(remembering(), "policy")
    for states in ({}, {KEY: 2**40}, {KEY: 16, "other": 1}):
        description["networks"][0]["states"] = states
        with pytest.raises(BundleError, match="do not agree"):
            PolicyBundle(packed(description, networks))
    case = PolicyBundle(remembering()).reference[0]
    assert np.abs(case["states"][KEY]).max() > 0.1, "cases from within episodes"
    changed = PolicyBundle(remembering(), check=False)
    changed.reference = [{**case, "next_states": {KEY: case["next_states"][KEY] + 0.01}}]
    with pytest.raises(
        BundleError, match=f"differs from the trained policy: .*`{KEY}`: the largest difference is 0.01"
    ):
        replay_reference(changed, 1e-4)


# -- in Maze's environments -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recurrent policy that was trained for a moment."""
    path = tmp_path_factory.mktemp("recurrent") / "run"
    short = ["algorithm.n_epochs=1", "algorithm.epoch_length=2", "algorithm.rollout_evaluator.n_episodes=2"]
    few = ["runner.concurrency=8", "runner.eval_concurrency=2", "env.n_items=2", "env.delay=1"]
    assert main(["-cn", "conf_train", "+experiment=recall_ppo", *short, *few, f"hydra.run.dir={path}"]) == 0
    return path


@pytest.fixture(scope="module")
def exported(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exported") / "policy.maze"
    return PolicyBundle.from_run(run, n_steps=200).save(path)


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [True, False])
def test_rollouts_of_a_bundle_are_those_of_the_run(
    run: Path, exported: Path, deterministic: bool, tmp_path: Path
) -> None:
    records = []
    settings = ["runner=sequential", "runner.n_episodes=6", "runner.record_actions=true", "seeding.env_base_seed=3"]
    settings += ["seeding.agent_base_seed=4", f"runner.deterministic={deterministic}", "env.n_items=2", "env.delay=1"]
    for name, policy in (
        ("run", [f"input_dir={run}", "policy=torch_policy"]),
        ("bundle", [f"policy.bundle={exported}", "policy=bundle"]),
    ):
        directory = tmp_path / name
        assert main(["env=recall", *settings, *policy, f"hydra.run.dir={directory}"]) == 0
        (found,) = directory.rglob("action_records")
        records.append({path.name: path.read_bytes() for path in sorted(found.iterdir())})
    assert len(records[0]) == 6
    assert records[0] == records[1]


@pytest.mark.slow
def test_a_bundle_of_a_run_has_its_logits_in_every_state_of_its_episodes(run: Path, exported: Path) -> None:
    difference = compared(PolicyBundle.load(exported), run, 200)
    assert difference.n_actions == 0
    assert difference.logits < 1e-5
    assert difference.draws > 1e-4


@pytest.mark.slow
def test_the_command_prints_the_hidden_states(run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--export", str(run), "--out", str(tmp_path / "policy.maze"), "--steps", "50"]) == 0
    said = capfd.readouterr().out
    assert re.search(r"recurrent state of \d+", said)


@pytest.mark.slow
def test_a_recurrent_bundle_acts_as_the_policy_in_vector_environments(tmp_path: Path) -> None:
    env = GymMazeEnv("CartPole-v1")
    policy = recurrent_model(env).policy
    path = tmp_path / "policy.maze"
    path.write_bytes(export_policy(policy, env, n_steps=40))
    found = []
    for each in (policy, BundlePolicy(path)):
        each.seed(2)
        envs = SequentialVectorEnv([lambda: GymMazeEnv("CartPole-v1")] * 3)
        envs.seed([1, 2, 3])
        record = RolloutGenerator(envs).rollout(each, 30)
        found.append([step.actions[0]["action"].tolist() for step in record.step_records])
    assert found[0] == found[1]


def test_a_deployment_and_models_of_others_carry_the_states(bundle: PolicyBundle, tmp_path: Path) -> None:
    path = bundle.save(tmp_path / "policy.maze")
    observations = [np.array(each, np.float32) for each in OBSERVATIONS[:12]]
    expected = decided(bundle, observations)
    with AgentDeployment.from_bundle(path, GymMazeEnv("CartPole-v1"), deterministic=True) as deployment:
        for _ in range(2):
            assert [deployment.act(each, 0.0, False, {}) for each in observations] == expected
            deployment.finish_episode()
    model = to_sb3(path)
    state, starts, found = None, np.ones(2, np.bool_), []
    for each in observations:
        actions, state = model.predict(np.stack([each, each]), state, starts, deterministic=True)
        starts = np.zeros(2, np.bool_)
        found.append(actions.tolist())
    assert found == [[action, action] for action in expected]
    with pytest.raises(EnvironmentContractError, match=r"`recurrence.state` in the shape \(1, 16\), found \(2, 16\)"):
        model.predict(observations[0], state, np.zeros(1, np.bool_))


def test_a_policy_in_an_environment_answers_again_from_the_same_state(bundle: PolicyBundle) -> None:
    env: MazeEnv[Any] = GymMazeEnv("CartPole-v1")
    policy = BundlePolicy(bundle)
    act = acting_in(env, policy, deterministic=True)
    env.seed(1)
    observation, expected = env.reset(), bundle.session()
    for _ in range(9):
        action = expected.act(env.get_maze_state())
        candidates, _ = policy.compute_top_action_candidates(observation, 1, None, env, env.actor_id())
        assert act(observation, env.actor_id())["action"] == candidates[0]["action"] == action
        observation, *_ = env.step({"action": action})
    with pytest.raises(ConfigError, match=r"BundlePolicy is recurrent: .* Pass the environment as `env`"):
        policy.compute_action(observation, None, None)


# -- served -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served({"policy": remembering()}) as (address, _):
        yield address


@pytest.fixture
def client(url: str) -> Iterator[PolicyClient]:
    with PolicyClient(url) as connection:
        yield connection


def test_server_session_keeps_recurrent_states(client: PolicyClient, bundle: PolicyBundle) -> None:
    expected = decided(bundle, OBSERVATIONS, seed=7)
    with client.session(seed=7) as session, client.session(seed=7) as other:
        for _ in range(2):
            for observation, action in zip(OBSERVATIONS, expected, strict=True):
                answer = session.act(observation, deterministic=False, ranked=2)
                assert (answer.action, answer.state) == (action, None)
                other.act(OBSERVATIONS[0])
            session.reset(seed=7)


def test_without_a_session_the_state_comes_with_the_answer_and_goes_with_the_next_request(
    client: PolicyClient, bundle: PolicyBundle
) -> None:
    local, state = bundle.session(), None
    for step, (observation, action) in enumerate(zip(OBSERVATIONS, decided(bundle, OBSERVATIONS), strict=True)):
        answer = client.act(observation, state=state, episode_start=step == 0)
        state = answer.state
        assert answer.action == action
        local.act(observation)
        assert state is not None
        assert np.float32(state["values"][KEY]).tobytes() == local.states[KEY].tobytes()
    begun_anew = client.act(OBSERVATIONS[0], state=state, episode_start=True)
    assert begun_anew.state == client.act(OBSERVATIONS[0], episode_start=True).state


def test_many_episodes_continue_in_one_request(client: PolicyClient, bundle: PolicyBundle) -> None:
    episodes = [OBSERVATIONS[:10], OBSERVATIONS[10:20], OBSERVATIONS[20:30]]
    expected = [decided(bundle, each) for each in episodes]
    states: list[Any] = [None] * 3
    for step in range(10):
        answers = client.act_many(
            [each[step] for each in episodes], states=states, episode_starts=[step == 0] * 3, deterministic=True
        )
        states = [answer.state for answer in answers]
        assert [answer.action for answer in answers] == [each[step] for each in expected]


@given(arrays.arrays(np.float32, 8))
def test_a_state_as_text_restores_every_bit(state: Any) -> None:
    if np.isfinite(state).all():
        text = as_json({"state": state.astype(np.float64)})
        assert np.array(json.loads(text)["state"], np.float32).tobytes() == state.tobytes()


@pytest.mark.parametrize(
    ("sent", "code", "text"),
    [
        ({}, "missing_state", "send the `state` of the previous decision"),
        ({"state": None}, "missing_state", "send the `state` of the previous decision"),
        ({"state": [0.0] * 16}, "invalid", "`state` must be an object"),
        ({"state": {}}, "wrong_state", "must be the object .* with `bundle` and `values`"),
        ({"state": {"bundle": "", "values": [1]}}, "state_of_other_bundle", "belongs to the bundle ''"),
        ({"state": {"bundle": "sha", "values": {}}}, "state_of_other_bundle", "begin another episode"),
        ({"state": {"values": {KEY: [0.0] * 3}}}, "wrong_state", r"has the shape \[1, 3\], expected \[1, 16\]"),
        ({"state": {"values": {"x": [0.0] * 3}}}, "wrong_state", r"found `states` \['x'\]"),
        ({"state": {"values": {KEY: ["a"] * 16}}}, "wrong_state", "has no numbers"),
        ({"state": {"values": {KEY: [1e60] * 16}}}, "wrong_state", "is not finite"),
        ({"episode_start": 1}, "invalid", "`episode_start` must be true or false"),
        ({"states": []}, "invalid", "`observation` and `states` exclude each other"),
        ({"observations": [[0.0] * 4], "states": []}, "invalid", "one entry for each of the 1 `observations`"),
        ({"observations": [[0.0] * 4], "episode_starts": [1]}, "invalid", "`episode_starts` must hold true or false"),
        ({"observations": [[0.0] * 4] * 2, "episode_starts": [True, False]}, "missing_state", r"observations\[1\]"),
    ],
)
def test_requests_without_a_state_that_fits_are_refused(
    url: str, bundle: PolicyBundle, sent: dict[str, Any], code: str, text: str
) -> None:
    if isinstance(state := sent.get("state"), dict) and "values" in state:
        sent = {"state": {"bundle": bundle.sha256, **state}}
    many = {} if "observations" in sent else {"observation": OBSERVATIONS[0]}
    reply = httpx.post(f"{url}/act", json={**many, **sent})
    assert reply.status_code in {409, 422}
    assert reply.json()["error"]["code"] == code
    assert re.search(text, reply.json()["error"]["message"])


def test_a_feed_forward_policy_responds_without_a_recurrent_state() -> None:
    with served({"policy": cartpole()}) as (url, _), PolicyClient(url) as client:
        assert client.act(OBSERVATIONS[0], episode_start=True).state is None
        state = {"bundle": PolicyBundle(cartpole()).sha256, "values": {KEY: [0.0]}}
        with pytest.raises(ServerError, match="the network carries no hidden states"):
            client.act(OBSERVATIONS[0], state=state)


def test_states_find_the_bundle_that_they_belong_to_and_no_other() -> None:
    first, second = remembering(), remembering(1)
    weights = {"old": 0.5, "new": 0.5}
    with served({"old": first, "new": second}, weights=weights) as (url, application), PolicyClient(url) as client:
        sent = [client.act(OBSERVATIONS[0], episode_start=True) for _ in range(20)]
        assert {answer.policy for answer in sent} == {"old", "new"}
        for answer in sent:
            assert client.act(OBSERVATIONS[1], state=answer.state).policy == answer.policy
        of_old = next(answer for answer in sent if answer.policy == "old")
        with pytest.raises(ServerError, match="does not decide here") as refused:
            client.act(OBSERVATIONS[1], state=of_old.state, policy="new")
        assert refused.value.status == 409
        application.policies.add("old", PolicyBundle(cartpole()))
        with pytest.raises(ServerError, match="begin another episode"):
            client.act(OBSERVATIONS[1], state=of_old.state)
        assert client.act(OBSERVATIONS[1], state=of_old.state, episode_start=True, policy="old").policy == "old"


def test_a_log_of_states_is_replayed_bit_for_bit(tmp_path: Path) -> None:
    log = DecisionLog(tmp_path / "log", {})
    bundles = {"policy": remembering(), "shadow": remembering(1)}
    with served(bundles, shadows=("shadow",), log=log) as (url, _), PolicyClient(url) as client:
        state = None
        for step, observation in enumerate(OBSERVATIONS[:10]):
            state = client.act(observation, state=state, episode_start=step == 0, deterministic=False, seed=step).state
        with client.session(seed=1) as one, client.session() as other:
            for observation in OBSERVATIONS[:10]:
                one.act(observation, deterministic=False)
                other.act(observation)
            one.reset()
            one.act(OBSERVATIONS[0])
    result = replay(tmp_path / "log", [PolicyBundle(content) for content in bundles.values()])
    # shadows have no hidden state for requests without a session
    assert (result.n_decisions, result.n_prepared, result.n_different) == (10 + 2 * 21, 10 + 2 * 21, 0)
    (path,) = (tmp_path / "log").iterdir()
    lines = path.read_bytes().splitlines()
    place = next(index for index, (_, line) in enumerate(read_lines(path), 1) if line["rows"][0]["n"] == 4)
    entry = json.loads(lines[place])
    entry["states"][KEY]["values"][3] += 1e-4
    lines[place] = json.dumps(entry).encode()
    path.write_bytes(b"\n".join(lines))
    result = replay(path, [PolicyBundle(content) for content in bundles.values()])
    assert result.n_different >= 1
    assert f"`{KEY}` differs" in result.first_difference


def test_observations_that_do_not_reach_the_network_do_not_change_hidden_states() -> None:
    far = [1e6] * 4
    settings = Settings(drift=DriftLimits(out_of_range=0.0), on_drift="fallback", fallback=lambda entries, actor: 0)
    with served({"policy": remembering()}, settings=settings) as (url, _), PolicyClient(url) as client:
        inside = next(each for each in OBSERVATIONS if client.act(each, episode_start=True).policy == "policy")
        begun = client.act(inside, episode_start=True)
        strayed = client.act(far, state=begun.state)
        assert (strayed.policy, strayed.state) == ("fallback", begun.state)
        with client.session() as session, client.session() as other:
            for each in (session, other):
                each.act(inside)
            assert other.act(far).policy == "fallback"
            found = [each.act(inside, ranked=2).ranked for each in (session, other)]
        assert found[0] == found[1]


def test_shadows_keep_recurrent_states() -> None:
    bundles = {"policy": remembering(), "same": remembering()}
    with served(bundles, shadows=("same",)) as (url, _), PolicyClient(url) as client:
        with client.session(seed=3) as session:
            for observation in OBSERVATIONS:
                session.act(observation, deterministic=False)
            session.reset()
            session.act(OBSERVATIONS[0], deterministic=False)
        metrics = metrics_of(httpx.get(f"{url}/metrics").text)
    assert metrics['maze_shadow_decisions_total{policy="same",result="equal"}'] == 41
