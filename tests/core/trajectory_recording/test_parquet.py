"""Episodes as tables: their columns, what stands in them, and that all files of an environment agree."""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import sys
from abc import ABC
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from gymnasium import spaces

from maze.core.agent.action_distribution import ExploringPolicy
from maze.core.agent.dummy_cartpole_policy import DummyCartPolePolicy
from maze.core.agent.policy import Policy
from maze.core.agent.random_policy import RandomPolicy
from maze.core.agent.torch_policy import TorchPolicy
from maze.core.env.structured_env import ActorID
from maze.core.errors import CheckpointError, ConfigError, ConfigImportError, EnvironmentContractError
from maze.core.events.event_record import EventRecord
from maze.core.rollout.parallel_rollout_runner import ParallelRolloutRunner
from maze.core.rollout.sequential_rollout_runner import SequentialRolloutRunner
from maze.core.trajectory_recording.datasets.in_memory_dataset import InMemoryDataset
from maze.core.trajectory_recording.datasets.logged_steps import LoggedSteps
from maze.core.trajectory_recording.records.spaces_record import SpacesRecord
from maze.core.trajectory_recording.writers.trajectory_writer_file import ParquetColumns, SubstepRow, read_parquet
from maze.core.utils.seeding import MazeSeeding
from maze.core.wrappers.log_stats_wrapper import LogStatsWrapper
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.core.wrappers.trajectory_recording_wrapper import ParquetRecordingWrapper
from maze.distributions.distribution_mapper import DistributionMapper
from maze.perception.models.built_in.flatten_concat import FlattenConcatPolicyNet
from maze_envs.packing.bin_packing import BinPackingEnv
from tests.train.parallelization.toy_envs import counting_env
from tutorial_maze_env.part06_struct_env.env.struct_env_masked import struct_env_factory

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


class ShopEvents(ABC):
    def sold(self, units: int | None, product: str, size: tuple[int, int] = (1, 2)) -> None:
        """Units of a product."""

    def closed(self) -> None:
        """Nobody came."""


SEEN = {
    "pick": spaces.Dict(stock=spaces.Box(0, 9, (2, 2), np.float32), hour=spaces.Discrete(24)),
    "amount": spaces.Dict(stock=spaces.Box(0, 9, (2, 2), np.float32), room=spaces.Box(0, 9, (1,), np.float16)),
}
DONE = {"pick": spaces.Dict(choice=spaces.Discrete(3)), "amount": spaces.Dict(choice=spaces.MultiDiscrete([5, 5]))}


def two_rows() -> list[SubstepRow]:
    stock = np.array([[1, 2], [3, 4]], np.float32)
    first = SpacesRecord(ActorID("pick", 0), {"stock": stock, "hour": np.array(7)}, {"choice": 2}, 0.0, False, {})
    second = SpacesRecord(
        *(
            ActorID("amount", 1),
            {"stock": stock + 1, "room": np.array([0.5], np.float16)},
            {"choice": np.array([1, 4])},
        ),
        *(1.5, True, {"TimeLimit.truncated": True}),
    )
    sold = [EventRecord(ShopEvents, ShopEvents.sold, {"units": units, "product": "tea"}) for units in (2, 3)]
    return [SubstepRow(0, 0, first), SubstepRow(0, 1, second, sold)]


def test_a_table_has_a_row_for_each_sub_step_and_a_column_for_each_entry(tmp_path: Path) -> None:
    path = ParquetColumns(SEEN, DONE, [ShopEvents]).write(
        tmp_path / "new" / "a.parquet", "a", two_rows(), {"waste": 0.25}
    )
    table = pq.read_table(path)
    assert table.to_pydict() == {
        "episode_id": ["a", "a"],
        "step": [0, 0],
        "substep": [0, 1],
        "step_key": ["pick", "amount"],
        "agent_id": [0, 1],
        "observation.stock": [[1, 2, 3, 4], [2, 3, 4, 5]],
        "observation.hour": [7, None],
        "observation.room": [None, 0.5],
        "action.choice": [[2], [1, 4]],  # of two shapes: lists of their own lengths
        "reward": [0.0, 1.5],
        "done": [False, True],
        "truncated": [False, True],
        "event.ShopEvents.sold": [0, 2],
        "event.ShopEvents.sold.units": [None, 5.0],
        "event.ShopEvents.sold.product": [None, None],
        "event.ShopEvents.sold.size": [None, None],
        "event.ShopEvents.closed": [0, 0],
        "events": [
            [],
            [{"event": "ShopEvents.sold", "attributes": json.dumps({"units": n, "product": "tea"})} for n in (2, 3)],
        ],
        "kpi.waste": [None, 0.25],
    }
    assert json.loads(table.schema.field("observation.stock").metadata[b"shape"]) == [2, 2]
    types = {name: str(table.schema.field(f"observation.{name}").type) for name in ("stock", "hour", "room")}
    assert types == {"stock": "list<element: float>", "hour": "int64", "room": "float"}


def test_values_outside_any_space_become_text(tmp_path: Path) -> None:
    seen = {0: spaces.Dict(note=spaces.Text(9), parts=spaces.Sequence(spaces.Discrete(3)))}
    record = SpacesRecord(ActorID(0, 0), {"note": "hot", "parts": (np.int64(1), 2)}, {}, 1.0, False, None)
    path = ParquetColumns(seen, {0: spaces.Dict()}).write(tmp_path / "a.parquet", "a", [SubstepRow(0, 0, record)])
    found = pq.read_table(path).to_pydict()
    assert (found["observation.note"], found["observation.parts"]) == (["hot"], ["[1, 2]"])


def test_a_value_that_is_not_in_its_space_is_named(tmp_path: Path) -> None:
    record = SpacesRecord(ActorID("pick", 0), {"stock": np.zeros(3), "hour": 1}, {"choice": 2}, 0.0, False, {})
    with pytest.raises(EnvironmentContractError, match=r"observation `stock`.*expected float32 of the shape \(2, 2\)"):
        ParquetColumns(SEEN, DONE).write(tmp_path / "a.parquet", "a", [SubstepRow(0, 0, record)])
    assert list(tmp_path.iterdir()) == []


def played(env: Any, directory: Path, n_episodes: int = 2) -> Any:
    env = ParquetRecordingWrapper.wrap(LogStatsWrapper.wrap(env), output_dir=directory)
    policy = RandomPolicy(env.action_spaces_dict)
    policy.seed(1)
    env.seed(1)
    for _ in range(n_episodes):
        observation, done = env.reset(), False
        while not done:
            observation, _, done, _ = env.step(policy.compute_action(observation, actor_id=env.actor_id()))
    env.close()
    return env


def test_an_episode_is_recorded_as_it_was_played(tmp_path: Path) -> None:
    played(counting_env(((3, "truncated"), (2, "terminated"))), tmp_path)
    tables = [pq.read_table(path) for path in sorted(tmp_path.iterdir())]
    tables.sort(key=len, reverse=True)
    assert tables[0].schema == tables[1].schema
    first = tables[0].to_pydict()
    assert first["observation.count"] == [[0, 0], [1, 0], [2, 0]]
    assert first["observation.flag"] == [0, 1, 0]
    assert (first["step"], first["substep"]) == ([0, 1, 2], [0, 0, 0])
    assert first["reward"] == [1, 2, 3]
    assert (first["done"], first["truncated"]) == ([False, False, True], [False, False, True])
    assert tables[1].to_pydict()["truncated"] == [False, False]


def test_sub_steps_events_and_kpis_have_separate_tables(tmp_path: Path) -> None:
    env = struct_env_factory(max_pieces_in_inventory=20, raw_piece_size=(100, 100), static_demand=[(30, 15)])
    from maze.core.wrappers.time_limit_wrapper import TimeLimitWrapper

    played(TimeLimitWrapper.wrap(env, max_episode_steps=6), tmp_path)
    steps = pd.read_parquet(tmp_path)  # several files as one table
    assert steps.groupby("episode_id").size().tolist() == [12, 12]
    assert steps["step_key"].tolist() == ["0", "1"] * 12
    assert steps["substep"].tolist() == [0, 1] * 12
    assert steps["action.piece_idx"].notna().tolist() == [True, False] * 12
    assert (steps.loc[steps["step_key"] == "0", "reward"] == 0).all()
    kpis = steps.filter(like="kpi.").columns.tolist()
    assert kpis
    assert steps[kpis[0]].notna().tolist() == ([False] * 11 + [True]) * 2
    counted = {name: steps[f"event.{name}"].sum() for name in ("CuttingEvents.valid_cut", "CuttingEvents.invalid_cut")}
    assert sum(counted.values()) == 12, "each step cuts, or fails to"
    listed = [event["event"] for events in steps["events"] for event in events]
    assert {name: listed.count(name) for name in counted} == counted


def test_an_abandoned_episode_is_written_without_kpis(tmp_path: Path) -> None:
    env = ParquetRecordingWrapper.wrap(BinPackingEnv(n_items=5), output_dir=tmp_path)
    env.seed(1)
    env.reset()
    env.step({"level": 150})
    assert list(tmp_path.iterdir()) == []
    env.reset()
    (path,) = tmp_path.iterdir()
    table = pq.read_table(path).to_pydict()
    assert (table["done"], table["event.PackingEvents.opened.bins"]) == ([False], [1.0])


def test_rollouts_write_the_same_tables_in_one_process_as_in_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    recording = {"record_trajectory": False, "record_event_logs": False, "record_parquet": True}
    for runner in (
        SequentialRolloutRunner(3, 8, render=False, **recording),
        ParallelRolloutRunner(3, 8, n_processes=2, **recording),
    ):
        directory = tmp_path / type(runner).__name__
        directory.mkdir()
        monkeypatch.chdir(directory)
        runner.maze_seeding = MazeSeeding(1, 2, False)
        env = {"_target_": "maze.core.wrappers.maze_gym_env_wrapper.GymMazeEnv", "env": "CartPole-v1"}
        runner.run_with(env, {}, {"_target_": "maze.core.agent.random_policy.RandomPolicy"})
        found.append({path.name: pq.read_table(path) for path in Path("trajectory_parquet").iterdir()})
    assert len(found[0]) == 3
    assert found[0] == found[1]


def probabilities_of(policy: Policy, directory: Path, **options: Any) -> LoggedSteps:
    """Record five episodes, with `options` of the runner, and return the log."""
    runner = SequentialRolloutRunner(5, 9, False, False, False, record_parquet=True, **options)
    runner.maze_seeding = MazeSeeding(1, 2, False)
    with contextlib.chdir(directory):
        runner.run_with(GymMazeEnv("CartPole-v1"), {}, policy)
    data = LoggedSteps.of_dataset(InMemoryDataset(directory / "trajectory_parquet"))
    shutil.rmtree(directory / "trajectory_parquet")
    return data


def test_tables_state_the_probabilities_of_sampled_actions(tmp_path: Path) -> None:
    env = GymMazeEnv("CartPole-v1")
    rule = DummyCartPolePolicy()
    data = probabilities_of(ExploringPolicy(rule, 0.5, env.action_spaces_dict), tmp_path)
    seen, actions = data.tables[0].observations["observation"], data.tables[0].actions["action"]
    obeyed = actions == np.array([rule.compute_action({"observation": row})["action"] for row in seen])
    assert 0 < obeyed.sum() < len(obeyed)
    np.testing.assert_allclose(data.propensities, np.where(obeyed, 0.75, 0.25))
    assert set(probabilities_of(RandomPolicy(env.action_spaces_dict), tmp_path).propensities) == {0.5}

    networks = {0: FlattenConcatPolicyNet({"observation": (4,)}, {"action": (2,)}, [8], torch.nn.Tanh)}
    policy = TorchPolicy(networks, DistributionMapper(env.action_space, {}), "cpu")
    policy.temperature = 0.25
    data = probabilities_of(policy, tmp_path)
    with torch.inference_mode():
        logits = networks[0]({"observation": torch.as_tensor(data.tables[0].observations["observation"]).float()})[
            "action"
        ]
    expected = torch.softmax(logits / 0.25, 1).numpy()[np.arange(len(data)), data.tables[0].actions["action"]]
    np.testing.assert_allclose(data.propensities, expected, rtol=1e-5)
    for options in ({"deterministic": True}, {"best_of": 2, "clairvoyant": True}):
        assert np.isnan(probabilities_of(policy, tmp_path, **options).propensities).all(), options
    assert np.isnan(probabilities_of(rule, tmp_path).propensities).all()


def test_a_full_disk_costs_tables_and_gives_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("maze.core.trajectory_recording.writers.trajectory_writer_file.atomic_write", full)
    with caplog.at_level(logging.WARNING):
        played(counting_env(), tmp_path, n_episodes=3)
    assert ["No space left on device" in record.getMessage() for record in caplog.records] == [True]


def test_missing_pyarrow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigImportError, match=r'pip install "maze-rl\[parquet\]>=1"'):
        ParquetRecordingWrapper.wrap(GymMazeEnv("CartPole-v1"), output_dir=tmp_path)


def test_a_table_is_read_as_episodes(tmp_path: Path) -> None:
    env = SimpleNamespace(observation_spaces_dict=SEEN, action_spaces_dict=DONE)
    path = ParquetColumns(SEEN, DONE).write(tmp_path / "a.parquet", "a", two_rows())
    (episode,) = read_parquet(path, env)  # type: ignore[arg-type]
    (step,) = episode.step_records
    for found, row in zip(step.substep_records, two_rows(), strict=True):
        assert (found.actor_id, found.reward, found.done) == (row.record.actor_id, row.record.reward, row.record.done)
        for values, expected in ((found.observation, row.record.observation), (found.action, row.record.action)):
            np.testing.assert_equal(values, expected)
    columns = {"episode_id": [1, 1, 0], "step": [1, 0, 0], "reward": [2.0, 1.0, 3.0], "propensity": [0.5, 0.25, 1.0]}
    pd.DataFrame({**columns, "observation.load": [0.1, 0.2, 0.3], "action.valve": [1, 0, 1]}).to_parquet(path)
    data = LoggedSteps.of_dataset(InMemoryDataset(path))
    assert data.rewards.tolist() == [3.0, 1.0, 2.0]
    assert data.propensities.tolist() == [1.0, 0.25, 0.5]
    assert data.truncated.tolist() == [True, False, True]
    path.write_bytes(b"PAR1")
    with pytest.raises(CheckpointError, match="is not a readable Parquet file"):
        list(read_parquet(path))
    pd.DataFrame({"reward": [1.0]}).to_parquet(path)
    with pytest.raises(CheckpointError, match=r"expected the columns \['episode_id', 'step', 'observation.<entry>'"):
        list(read_parquet(path))


def test_empty_cells_of_a_table_count_as_missing_columns(tmp_path: Path) -> None:
    rows = pa.table(
        {
            "episode_id": ["a", "a", "b"],
            "step": [0, 1, 0],
            "reward": [1.0, 2.0, 3.0],
            "observation.load": [[0.1], [0.2], [0.3]],
            "action.valve": [0, 1, 1],
            "step_key": pa.array([None] * 3, pa.string()),
            "agent_id": [None, 0, None],
            "done": [None, True, None],
            "propensity": [0.25, None, 0.5],
        }
    )
    pq.write_table(rows, tmp_path / "a.parquet")
    data = LoggedSteps.of_dataset(InMemoryDataset(tmp_path / "a.parquet"))
    assert (data.step_keys, data.agent_ids.tolist()) == ([0, 0, 0], [0, 0, 0])
    assert data.propensities[[0, 2]].tolist() == [0.25, 0.5]
    assert np.isnan(data.propensities[1])
    assert (data.terminated.tolist(), data.truncated.tolist()) == ([False, True, False], [False, False, True])
    pq.write_table(rows.set_column(1, "step", pa.array([0, None, 0])), tmp_path / "a.parquet")
    with pytest.raises(CheckpointError, match="expected a value in each row of step, found none"):
        list(read_parquet(tmp_path / "a.parquet"))


PLANT = SimpleNamespace(
    observation_spaces_dict={0: spaces.Dict(load=spaces.Box(0, 1, (1,), np.float32), site=spaces.Discrete(3))},
    action_spaces_dict={0: spaces.Dict(valve=spaces.Discrete(4))},
    agent_counts_dict={0: 1},
)


def plant_rows() -> dict[str, list[Any]]:
    """Two episodes of three decisions, as a plant logs them."""
    return {
        "episode_id": ["a", "a", "a", "b", "b", "b"],
        "step": [0, 1, 2, 0, 1, 2],
        "reward": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
        "done": [False, False, True, False, False, False],
        "observation.load": [[0.1], [0.2], [0.3], [0.4], [0.5], [0.6]],
        "observation.site": [0, 0, 0, 2, 2, 2],
        "action.valve": [0, 3, 1, 2, 2, 0],
    }


def test_a_truncated_row_ends_its_episode_without_being_done(tmp_path: Path) -> None:
    columns = plant_rows() | {"truncated": [False, True, False, False, False, False]}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    data = LoggedSteps.of_dataset(InMemoryDataset(tmp_path / "a.parquet", lambda: PLANT))  # type: ignore[arg-type]
    assert data.episode_starts.tolist() == [0, 2, 3, 6]
    assert data.truncated.tolist() == [False, True, False, False, False, True]
    assert data.terminated.tolist() == [False, False, True, False, False, False]


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("step", [0, 1, 3, 0, 1, 2], "episode a, step 3: expected step 2"),
        ("step", [5, 6, 7, 0, 1, 2], "episode a, step 5: expected step 0, .*another file"),
        ("step", [0, 1, 2, 0, 1, 1], r"episode b, step 1: expected one row of \(0, 0\) in a step, found two"),
        ("episode_id", ["a"] * 6, "episode a, step 0: expected one row"),  # of two sites, or exported twice
        ("step", ["8", "9", "10", "0", "1", "2"], "episode a, step 10: expected step 0"),  # would be ordered as text
        ("action.valve", [0, 3, 1.7, 2, 2, 0], "episode a, step 2: `action.valve`: .* found .*1.7"),
        ("action.valve", [0, 3, 1, 2, None, 0], "episode b, step 1: expected a value of action.valve, found none"),
        ("observation.site", ["n", "n", "n", "s", "s", "s"], "episode a, step 0: `observation.site`: .* found .*'n'"),
        ("done", [False, True, True, False, False, False], "episode a, step 2: expected no further step, as step 1 is"),
        ("done", ["no", "no", "yes", "no", "no", "yes"], "episode a, step 0: `done`.* found .*'no'"),
        ("reward", ["1.5"] * 6, "episode a, step 0: `reward`: .* found .*'1.5'"),
        ("propensity", ["half"] * 6, "episode a, step 0: `propensity`: .* found .*'half'"),
        ("agent_id", [0, 0, 0.5, 0, 0, 0], "episode a, step 2: `agent_id`: .* found .*0.5"),
        ("observation.load", [["0.1"]] * 6, "episode a, step 0: `observation.load`: .* found .*'0.1'"),
    ],
)
def test_rows_that_would_be_read_as_others_are_refused(
    column: str, values: list[Any], message: str, tmp_path: Path
) -> None:
    pq.write_table(pa.table(plant_rows() | {column: values}), tmp_path / "a.parquet")
    with pytest.raises(CheckpointError, match=message):
        list(read_parquet(tmp_path / "a.parquet", PLANT))  # type: ignore[arg-type]


@pytest.mark.parametrize("agent", [-1, 1])
def test_decisions_of_unknown_agents_are_refused(agent: int, tmp_path: Path) -> None:
    pq.write_table(pa.table(plant_rows() | {"agent_id": [0, 0, 0, 0, agent, 0]}), tmp_path / "a.parquet")
    with pytest.raises(
        ConfigError, match=rf"a.parquet, episode b, step 1, sub-step 0: agent {agent} is unkn.* 1 agent"
    ):
        InMemoryDataset(tmp_path / "a.parquet", lambda: PLANT)  # type: ignore[arg-type]


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), None])
def test_rewards_of_estimates_are_finite(reward: float | None, tmp_path: Path) -> None:
    pq.write_table(pa.table(plant_rows() | {"reward": [1.0, 2.0, 3.0, 4.0, reward, 6.0]}), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=r"episode 1, decision 1: .* a finite reward .* found the reward"):
        LoggedSteps.of_dataset(InMemoryDataset(tmp_path / "a.parquet", lambda: PLANT))  # type: ignore[arg-type]


def test_recorded_tables_may_leave_out_steps(tmp_path: Path) -> None:
    """Wrappers that repeat actions record one row for several steps, and fewer at the end of an episode."""
    first, second = two_rows()
    running = second._replace(record=replace(second.record, done=False))
    rows = [first._replace(step=2), running._replace(step=3, substep=0), second._replace(step=5, substep=0)]
    path = ParquetColumns(SEEN, DONE).write(tmp_path / "a.parquet", "a", rows)
    env = SimpleNamespace(observation_spaces_dict=SEEN, action_spaces_dict=DONE)
    (episode,) = read_parquet(path, env)  # type: ignore[arg-type]
    assert len(episode.step_records) == 3
