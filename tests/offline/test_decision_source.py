"""Decisions of a server, their probabilities and outcomes, and the episodes made of them."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from maze.core.agent.policy import Policy
from maze.core.agent.random_policy import RandomPolicy
from maze.core.errors import ConfigError
from maze.core.trajectory_recording.datasets.decision_data import join_decision_log, log_files
from maze.core.trajectory_recording.datasets.in_memory_dataset import InMemoryDataset
from maze.core.trajectory_recording.datasets.logged_steps import LoggedSteps
from maze.distributions.distribution_mapper import DistributionMapper
from maze.distributions.numpy_distributions import probabilities_of, sampler_of, uniform_logits
from maze.offline.estimate import EstimationConfig, estimate
from maze.offline.estimation import CompleteTrajectoryProcessor, log_facts
from maze.offline.fitted_q import FittedQConfig
from maze.serve.bundle import PolicyBundle
from maze.serve.client import PolicyClient, ServerError
from maze.serve.decision_log import DecisionLog, replay
from maze.serve.policies import Policies
from maze.serve.served import Settings
from tests.serve.serving import always, cartpole, cartpole_observations, cutting, pendulum, served

OBSERVATIONS = cartpole_observations(4)
ACTIONS = {0: spaces.Dict(action=spaces.Discrete(2))}


@pytest.mark.parametrize(
    ("space", "squashed"),
    [
        (spaces.Discrete(4), False),
        (spaces.MultiDiscrete([2, 3]), False),
        (spaces.MultiBinary(3), False),
        (spaces.Box(-1.0, 2.0, (2,), np.float32), True),
        (spaces.Box(-np.inf, np.inf, (2, 2), np.float32), False),
    ],
    ids=str,
)
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_probabilities_are_those_of_the_torch_distributions(
    space: spaces.Space[Any], temperature: float, squashed: bool
) -> None:
    name = "maze.distributions.squashed_gaussian.SquashedGaussianProbabilityDistribution"
    mapping = [{"action_space": "gym.spaces.Box", "distribution": name}] if squashed else {}
    mapper = DistributionMapper(spaces.Dict(head=space), mapping)
    head = mapper.describe_head("head")
    assert head is not None
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(6, *mapper.required_logits_shape("head"))).astype(np.float32)
    actions = sampler_of(head)(logits, rng, temperature)
    distribution = mapper.action_head_distribution("head", torch.from_numpy(logits), temperature)
    expected = distribution.log_prob(torch.as_tensor(actions)).exp().numpy()
    found = probabilities_of(head, logits, actions, temperature)
    np.testing.assert_allclose(found, expected, rtol=2e-3)


def test_uniform_logits_leave_masked_actions_out() -> None:
    head = {"distribution": "categorical", "n": 3}
    logits = np.array([[2.0, np.finfo(np.float32).min, -1.0]], np.float32)
    found = [probabilities_of(head, uniform_logits(head, logits), np.array([choice])) for choice in range(3)]
    np.testing.assert_allclose(np.concatenate(found), [0.5, 0.0, 0.5])  # type: ignore[arg-type]


def logged_episodes(directory: Path, n_episodes: int = 60, explore: float = 0.4) -> None:
    """Sessions of two decisions; action 1 is worth 1, which the policy would never take by itself."""
    log = DecisionLog(directory, {})
    with served({"p": always(0)}, settings=Settings(explore=explore), log=log) as (url, _), PolicyClient(url) as client:
        for _ in range(n_episodes):
            with client.session() as session:
                for step in range(2):
                    answer = session.act(OBSERVATIONS[step])
                    for _ in range(2):  # a repeated report changes nothing
                        client.report(answer.decision, float(answer.action), done=step == 1, kpis={"cost": 2.0})


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("log")
    logged_episodes(path)
    return path


def steps_of(path: Path) -> LoggedSteps:
    return LoggedSteps.of_dataset(InMemoryDataset(path))


def test_decisions_are_joined_with_their_outcomes(directory: Path) -> None:
    joined = join_decision_log(directory)
    assert joined.left_out == {}
    data = steps_of(directory)
    assert (data.n_episodes, len(data)) == (60, 120)
    actions = data.tables[0].actions["action"]
    np.testing.assert_array_equal(data.rewards, actions)
    np.testing.assert_allclose(data.propensities, np.where(actions == 0, 0.8, 0.2))
    assert 0.1 < actions.mean() < 0.32
    assert data.terminated.reshape(60, 2).tolist() == [[False, True]] * 60
    np.testing.assert_allclose(data.tables[0].observations["observation"][0], OBSERVATIONS[0], rtol=1e-6)


def test_another_policy_is_estimated_from_the_log(directory: Path) -> None:
    config = EstimationConfig(gamma=1.0, estimators=("pdis",), min_effective_episodes=10)
    _, entry = estimate({"random": RandomPolicy(dict(ACTIONS))}, steps_of(directory), ACTIONS, config)
    assert entry.estimate.value == pytest.approx(1.0, abs=1.2)  # four standard deviations


def test_returns_of_each_policy_of_a_canary_are_described(tmp_path: Path) -> None:
    log = DecisionLog(tmp_path, {})
    with served({"old": always(0), "new": always(1)}, log=log) as (url, _), PolicyClient(url) as client:
        for policy in ("old", "new", "new"):
            with client.session(policy=policy) as session:
                answer = session.act(OBSERVATIONS[0])
                client.report(answer.decision, float(answer.action), done=True)
    data = steps_of(tmp_path)
    assert data.acted_by == ["old", "new", "new"]
    facts = dict(log_facts(data))
    assert facts["Returns of new"] == "mean 1 (95 %: 1 to 1) in 2 episodes"
    assert facts["Returns of old"] == "mean 0 in 1 episodes"  # one value has no interval


def test_the_episodes_of_one_of_several_environments_are_selected_by_the_name_of_their_policy(tmp_path: Path) -> None:
    log = DecisionLog(tmp_path, {})
    with served({"pole": always(0), "swing": pendulum()}, log=log) as (url, _), PolicyClient(url) as client:
        for policy, observation in (("pole", OBSERVATIONS[0]), ("swing", [1.0, 0.0, 0.1]), ("pole", OBSERVATIONS[1])):
            with client.session(policy=policy) as session:
                client.report(session.act(observation).decision, 1.0, done=True)
    with pytest.raises(ConfigError, match="several environments"):
        steps_of(tmp_path)
    shapes = {0: spaces.Dict(observation=spaces.Box(-9, 9, np.shape(OBSERVATIONS[0])))}
    for name, n_episodes in (("pole", 2), ("swing", 1)):
        data = LoggedSteps.of_dataset(InMemoryDataset(tmp_path, trajectory_processor=CompleteTrajectoryProcessor(name)))
        assert (data.n_episodes, set(data.acted_by)) == (n_episodes, {name})
        if name == "pole":
            data.require_spaces(shapes, ACTIONS)


def test_explored_actions_are_not_reported_as_differences_in_a_replay(directory: Path) -> None:
    result = replay(directory, [PolicyBundle(always(0))])
    assert (result.n_decisions, result.n_different) == (120, 0)


def test_masked_actions_are_not_explored(tmp_path: Path) -> None:
    log = DecisionLog(tmp_path, {})
    with served({"p": cutting()}, settings=Settings(explore=1.0), log=log) as (url, _), PolicyClient(url) as client:
        schema = client.request("GET", "/policies/p")["steps"][0]["observation"]
        observation = {name: np.zeros(space["shape"], space.get("dtype", "float32")) for name, space in schema.items()}
        mask = next(name for name in observation if "mask" in name)
        observation[mask][[0, 2]] = 1
        step = client.request("GET", "/policies/p")["steps"][0]["step"]
        chosen = {json.dumps(client.act(observation, step_key=step).action) for _ in range(40)}
    assert len(chosen) == 2


def test_sampled_decisions_have_the_probabilities_of_their_networks(tmp_path: Path) -> None:
    with (
        served({"p": cartpole()}, log=DecisionLog(tmp_path, {})) as (url, _),
        PolicyClient(url) as client,
    ):
        for episode in range(3):
            for step in range(2):
                options = {"episode": f"e{episode}", "step": step, "deterministic": False, "ranked": 2}
                answer = client.act(OBSERVATIONS[step], **options)
                probability = {each["action"]: each["probability"] for each in answer.ranked}[answer.action]
                client.report(answer.decision, probability, truncated=step == 1)
    data = steps_of(tmp_path)
    assert data.n_episodes == 3
    np.testing.assert_allclose(data.propensities, data.rewards, rtol=1e-6)
    assert data.truncated.sum() == 3
    complete = InMemoryDataset(tmp_path, trajectory_processor=CompleteTrajectoryProcessor())
    assert len(LoggedSteps.of_dataset(complete)) == 6  # the last decision of a truncated episode stays


class Pushes(Policy):
    """Always the same continuous action."""

    def compute_action(self, *arguments: Any, **options: Any) -> Any:
        return {"action": np.array([0.5], np.float32)}


@pytest.mark.parametrize("deterministic", [True, False])
def test_deterministic_continuous_actions_have_no_density(tmp_path: Path, deterministic: bool) -> None:
    actions = {0: spaces.Dict(action=spaces.Box(-2.0, 2.0, (1,), np.float32))}
    log = DecisionLog(tmp_path, {})
    with served({"p": pendulum()}, log=log) as (url, _), PolicyClient(url) as client:
        for episode in range(3):
            for step in range(2):
                seen = np.array([1.0, 0.1 * step, 0.1 * episode], np.float32)
                options = {"episode": f"e{episode}", "step": step, "deterministic": deterministic}
                client.report(client.act(seen, **options).decision, 1.0, done=step == 1)
    data = steps_of(tmp_path)
    assert np.isnan(data.propensities).all() == deterministic
    fast = FittedQConfig(n_updates=20, hidden_units=4)
    config = EstimationConfig(n_bootstrap=4, estimators=("fqe", "wis"), max_unsupported=1.0, fitted_q=fast)
    _, fitted, weighted = estimate({"same": Pushes()}, data, actions, config)
    assert fitted.refusal == ""
    expected = "`deterministic: false` for continuous actions" if deterministic else "The policy's continuous actions"
    assert expected in weighted.refusal


def test_incomplete_decisions_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logged_episodes(tmp_path, 3)
    (file,) = log_files(tmp_path)
    lines = file.read_bytes().splitlines()
    outcomes = [index for index, line in enumerate(lines) if b'"outcome"' in line]
    lines[outcomes[0]], lines[outcomes[1]] = b"}{", b'{"kind": "outcome", "decision": 3}'
    lines.append(b'{"kind": "outcome", "decision": "0123abcd-9", "reward": 1}')
    file.write_bytes(b"\n".join(lines) + b"\n")
    with caplog.at_level(logging.WARNING):
        joined = join_decision_log(tmp_path)
    assert len(joined.episodes) == 2
    assert joined.left_out == {
        "lines damaged": 2,
        "outcomes of unknown decisions": 1,
        "in episodes with decisions without outcome": 2,
    }
    assert f":{outcomes[0] + 1}" in caplog.text
    assert f"does not contain: decisions-000001.jsonl:{len(lines)}" in caplog.text
    assert "4 decisions in 2 episodes; left out: 2 in episodes" in joined.summary()
    file.write_bytes(b"\n".join(lines[: outcomes[0] - 1]) + b"\n")
    with pytest.raises(ConfigError, match="holds no complete episode"):
        steps_of(tmp_path)


def test_texts_as_flags_of_outcomes_are_refused_with_their_place(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logged_episodes(tmp_path, 2)
    (file,) = log_files(tmp_path)
    lines = [json.loads(line) for line in file.read_bytes().splitlines()]
    outcomes = [index for index, line in enumerate(lines) if line.get("kind") == "outcome"]
    for index in outcomes[:2]:  # both reports of the first decision
        lines[index]["done"] = "no"
    file.write_text("\n".join(map(json.dumps, lines)) + "\n")
    joined = join_decision_log(tmp_path)
    assert len(joined.episodes) == 1
    assert joined.left_out == {"lines damaged": 2, "in episodes with decisions without outcome": 2}
    assert f"decisions-000001.jsonl:{outcomes[0] + 1} is not an entry" in caplog.text
    assert "`done`: expected true or false, found 'no'" in caplog.text


def test_contradicting_outcomes_leave_out_their_episode_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logged_episodes(tmp_path, 3)
    (file,) = log_files(tmp_path)
    lines = file.read_bytes().splitlines()
    outcome = json.loads(next(line for line in lines if b'"outcome"' in line))
    lines.append(json.dumps({**outcome, "reward": 7.0}).encode())
    file.write_bytes(b"\n".join(lines) + b"\n")
    joined = join_decision_log(tmp_path)
    assert (len(joined.episodes), joined.left_out) == (2, {"in episodes with contradicting outcomes": 2})
    assert f"decisions-000001.jsonl:{len(lines)}: the outcome" in caplog.text


def test_values_outside_of_their_spaces_leave_out_their_episodes_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logged_episodes(tmp_path, 4)
    (file,) = log_files(tmp_path)
    lines = [json.loads(line) for line in file.read_bytes().splitlines()]
    decided = [index for index, line in enumerate(lines) if line.get("kind") == "decided"]
    lines[decided[0]]["actions"]["action"]["values"] = [7]
    lines[decided[5]]["inputs"]["observation"]["values"][0] = float("nan")
    file.write_text("\n".join(map(json.dumps, lines)) + "\n")
    shapes = {0: spaces.Dict(observation=spaces.Box(-9, 9, np.shape(OBSERVATIONS[0])))}
    env = SimpleNamespace(observation_spaces_dict=shapes, action_spaces_dict=ACTIONS, agent_counts_dict={0: 1})
    joined = join_decision_log(tmp_path, env)  # type: ignore[arg-type]
    assert (len(joined.episodes), joined.left_out) == (2, {"in episodes with values outside of their spaces": 4})
    for index in (decided[0], decided[5]):
        assert f"decisions-000001.jsonl:{index + 1}: values outside" in caplog.text
    data = LoggedSteps.of_dataset(InMemoryDataset(joined.episodes))
    data.require_spaces(shapes, ACTIONS)


def test_unknown_agents_and_decisions_after_an_end_leave_out_their_episodes_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logged_episodes(tmp_path, 4)
    (file,) = log_files(tmp_path)
    lines = [json.loads(line) for line in file.read_bytes().splitlines()]
    decided = [index for index, line in enumerate(lines) if line.get("kind") == "decided"]
    first = lines[decided[0]]["rows"][0]["decision"]
    for outcome in (line for line in lines if line.get("kind") == "outcome" and line["decision"] == first):
        outcome["done"] = True  # the client did not reset its session
    lines[decided[3]]["rows"][0]["agent_id"] = 3
    file.write_text("\n".join(map(json.dumps, lines)) + "\n")
    spaces_dict = {0: spaces.Dict(observation=spaces.Box(-9, 9, np.shape(OBSERVATIONS[0])))}
    env = SimpleNamespace(observation_spaces_dict=spaces_dict, action_spaces_dict=ACTIONS, agent_counts_dict={0: 1})
    joined = join_decision_log(tmp_path, env)  # type: ignore[arg-type]
    assert len(joined.episodes) == 2
    assert joined.left_out == {"in episodes with unknown agents": 2, "in episodes that continue after their end": 2}
    assert f"decisions-000001.jsonl:{decided[3] + 1}: unknown agents" in caplog.text
    assert f"decisions-000001.jsonl:{decided[1] + 1}: the step before was reported as the last one" in caplog.text


def test_bad_clocks_and_probabilities_and_other_spaces_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logged_episodes(tmp_path, 3)
    (file,) = log_files(tmp_path)
    lines = [json.loads(line) for line in file.read_bytes().splitlines()]
    decided = [line for line in lines if line.get("kind") == "decided"]
    decided[1]["time"] = decided[0]["time"] - 100.0
    decided[4]["probabilities"] = {"action": [-0.5]}
    file.write_text("\n".join(map(json.dumps, lines)) + "\n")
    joined = join_decision_log(tmp_path)
    assert len(joined.episodes) == 2
    assert "the clock ran backwards" in caplog.text
    assert "expected positive probabilities, found [-0.5]" in caplog.text
    decided[2]["probabilities"] = {"action": [1.5]}
    file.write_text("\n".join(map(json.dumps, lines)) + "\n")
    shapes = {0: spaces.Dict(observation=spaces.Box(-9, 9, np.shape(OBSERVATIONS[0])))}
    with pytest.raises(ConfigError, match=r"episode 1, decision 0: expected a probability of at most 1, found 1.5"):
        steps_of(tmp_path).require_spaces(shapes, ACTIONS)
    with pytest.raises(ConfigError, match=r"sub-step 0: expected the action entries \['valve'\]"):
        steps_of(tmp_path).require_spaces(shapes, {0: spaces.Dict(valve=spaces.Discrete(2))})
    with pytest.raises(ConfigError, match=r"sub-step 0 is unknown; there are \['pick'\]"):
        steps_of(tmp_path).require_spaces({"pick": shapes[0]}, {"pick": ACTIONS[0]})


def test_wrong_outcomes_and_settings_are_refused(tmp_path: Path) -> None:
    with served({"p": always(0)}) as (url, _), PolicyClient(url) as client:
        answer = client.act(OBSERVATIONS[0])
        with pytest.raises(ServerError, match="start with --decision-log"):
            client.report(answer.decision, 1.0)
    with served({"p": always(0)}, log=DecisionLog(tmp_path, {})) as (url, _), PolicyClient(url) as client:
        with pytest.raises(ServerError, match="not the identifier of a decision"):
            client.report("x", 1.0)
        for wrong in ({"kpis": {"cost": "high"}}, {"done": 1}, {"regret": 1.0}):
            with pytest.raises(ServerError):
                client.report("0123abcd-9", 1.0, **wrong)
    with pytest.raises(ConfigError, match="continuous action heads"):
        Policies(Settings(explore=0.1)).add("p", PolicyBundle(pendulum()))
