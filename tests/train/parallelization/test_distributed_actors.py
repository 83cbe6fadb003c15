"""Actors: tickets, joined rollouts, the same data wherever they run, and what happens when one fails."""

from __future__ import annotations

import contextlib
import copy
import os
import signal
import subprocess
import sys
import textwrap
import time
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from maze.core.agent.torch_policy import TorchPolicy
from maze.core.env.base_env_events import BaseEnvEvents
from maze.core.env.maze_env import MazeEnv
from maze.core.errors import ConfigError, NonFiniteError, WorkerError
from maze.core.log_stats.log_stats import LogStatsLevel
from maze.core.rollout.rollout_generator import RolloutGenerator
from maze.core.utils.worker_pool import EnvWorkerError, LocalPool, ProcessPool
from maze.train.parallelization.broadcasting_container import BroadcastingContainer, BroadcastingManager
from maze.train.parallelization.distributed_actors.distributed_actors import RolloutTickets
from maze.train.parallelization.distributed_actors.env_groups import (
    bytes_of,
    join_rollouts,
    packed_weights,
    unpack_weights,
)
from maze.train.parallelization.distributed_actors.sequential_distributed_actors import SequentialDistributedActors
from maze.train.parallelization.distributed_actors.subproc_distributed_actors import SubprocDistributedActors
from maze.train.parallelization.vector_env.sequential_vector_env import SequentialVectorEnv
from maze.train.parallelization.vector_env.vector_env_utils import ActorSpaces
from tests.train.parallelization.toy_envs import Observe, PassOn, RandomWalkCoreEnv, counting_env, random_walk_env
from tests.train.parallelization.toy_policies import ENVS, make_policy


def subproc(env_factory: Any, policy: TorchPolicy | None = None, **arguments: Any) -> SubprocDistributedActors:
    values = {"n_rollout_steps": 4, "n_actors": 2, "batch_size": 2, "queue_out_of_sync_factor": 1.0, **arguments}
    n_envs = values["n_actors"] * values.get("envs_per_actor", 1)
    return SubprocDistributedActors(
        env_factory,
        policy or make_policy(env_factory),
        start_method="forkserver",
        actor_env_seeds=list(range(n_envs)),
        actor_agent_seeds=list(range(values["n_actors"])),
        **values,
    )


# -- tickets ----------------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_no_rollout_is_too_old_and_the_learner_never_waits_without_actors(data):
    n_actors, batch_size = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6))
    queue_size = data.draw(st.integers(0, 8))
    tickets = RolloutTickets(n_actors, batch_size, queue_size)
    waiting: list[int] = []
    unfinished: list[int] = []
    for _ in range(12):
        for _ in range(batch_size):
            while True:
                unfinished += tickets.issue()
                n_out = len(unfinished) + len(waiting)
                assert n_out <= queue_size + n_actors
                assert n_out == queue_size + n_actors or set(unfinished) == set(range(n_actors)), "an actor idles"
                if (actor := tickets.next_of(waiting)) is not None:
                    break
                assert unfinished, "the learner waits, but all rollouts are finished"
                quick = data.draw(st.sampled_from(unfinished))
                unfinished.remove(quick)
                tickets.finished(quick)
                waiting.append(quick)
            waiting.remove(actor)
            assert tickets.version - tickets.take(actor) <= tickets.max_age
        tickets.updated()
        if data.draw(st.integers(0, 5)) == 0:  # a machine joins
            tickets.add_actor()
            n_actors += 1


def test_rollouts_are_consumed_in_order_of_arrival_within_the_allowed_age():
    tickets = RolloutTickets(n_actors=3, batch_size=1, queue_size=0)
    assert tickets.max_age == 3
    assert tickets.issue() == [0, 1, 2]
    taken = []
    for _ in range(2):  # the first actor is quick
        tickets.finished(0)
        assert tickets.next_of([0]) == 0
        taken.append(tickets.take(0))
        assert tickets.issue() == [0]
        tickets.updated()
    assert taken == [0, 0]
    assert tickets.next_of([0]) is None  # the two others must come in the two updates that they have left
    assert tickets.next_of([0, 2]) == 2


def test_an_actor_is_ahead_as_far_as_a_batch_needs():
    tickets = RolloutTickets(n_actors=2, batch_size=4, queue_size=8)
    assert sorted(tickets.issue()) == [0, 0, 0, 1, 1, 1]  # one, and two of each in a batch
    tickets.finished(1)
    assert tickets.issue() == [1]
    for _ in range(3):
        tickets.finished(1)
        tickets.issue()
    tickets.finished(1)
    assert tickets.issue() == []  # all ten tickets are in use
    tickets.take(1)
    assert tickets.issue() == [1]


# -- weights and rollouts ---------------------------------------------------------------------------


class Keeper:
    """Remembers the arrays that it has received."""

    def __init__(self):
        self.received = []

    def take(self, *arrays):
        self.received += [None if array is None else array.copy() for array in arrays]
        return self.received

    def close(self):
        pass


@pytest.mark.parametrize("start_method", ["fork", "forkserver"])
def test_calls_in_processes_get_the_arrays_that_were_stored_before_them(start_method):
    with contextlib.closing(ProcessPool(2, start_method)) as pool:
        pool.host("keeper", lambda *_: Keeper)
        first, second = pool.put(np.arange(5)), pool.put(np.ones((2, 3), np.float32))
        tasks = [pool.submit(index, "keeper", "take", first, second) for index in range(2)]
        others = pool.put(np.arange(5) + 5), pool.put(np.zeros(0, np.uint8))
        tasks.append(pool.submit(1, "keeper", "take", first, *others))
        assert pool.finished(tasks, len(tasks)) == tasks
        for task in tasks:
            np.testing.assert_array_equal(task.result[0], np.arange(5))
            np.testing.assert_array_equal(task.result[1], np.ones((2, 3)))
        np.testing.assert_array_equal(tasks[2].result[2], np.arange(5), "another array of this size was stored")
        np.testing.assert_array_equal(tasks[2].result[3], np.arange(5) + 5)
        assert tasks[2].result[4].shape == (0,)


@pytest.mark.parametrize("make_pool", [LocalPool, partial(ProcessPool, 2, "fork")])
def test_pieces_of_work_are_each_delivered_once(make_pool):
    pieces = iter([(np.full(1, number),) for number in range(7)])
    with contextlib.closing(make_pool()) as pool:
        pool.host("keeper", lambda *_: Keeper)
        delivered = [arguments[0][0] for arguments, _ in pool.hand_out("keeper", "take", lambda: next(pieces, None))]
    assert sorted(delivered) == list(range(7))


def test_weights_of_all_types_are_packed_and_unpacked():
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    packed = packed_weights({"policies": {0: net.state_dict()}})
    other = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    unpack_weights(packed, bytes_of({"policies": {0: other.state_dict()}}))
    assert torch.equal(other[0].weight, net[0].weight)
    assert other[1].num_batches_tracked.shape == ()


@pytest.mark.parametrize("name", ENVS)
def test_rollouts_joined_side_by_side_are_what_each_actor_collected(name):
    factory = ENVS[name]
    policy = make_policy(factory)
    packets, spaces = [], None
    for actor in range(3):
        env = SequentialVectorEnv([factory] * 2)
        env.seed([10 * actor, 10 * actor + 1])
        generator = RolloutGenerator(env, record_logits=True)
        spaces = ActorSpaces.of(env)
        packets.append(copy.deepcopy(generator.collect(policy, generator.allocate(6, policy))))
    joined = spaces.columns(6, 6, policy)
    for _ in range(2):  # columns are used again
        join_rollouts(packets, joined)
    assert joined.is_dense() == all(packet.actor_sequence is not None for packet in packets)
    for actor, packet in enumerate(packets):
        envs = slice(2 * actor, 2 * actor + 2)
        first_tick = joined.n_ticks - len(packet.rewards)  # shorter rollouts begin later
        for array in ("rewards", "terminated", "truncated", "step_complete"):
            assert np.array_equal(getattr(joined, array)[first_tick:, envs], getattr(packet, array))
            assert not getattr(joined, array)[:first_tick, envs].any()
        for key, part in packet.substeps.items():
            substep = joined.substeps[key]
            valid = part.valid if part.valid is not None else np.ones(part.agent_ids.shape, np.bool_)
            rows = np.searchsorted(substep.ticks, part.ticks + first_tick)
            if substep.valid is not None:
                assert substep.valid[:, envs].sum() == valid.sum()
            for row, joined_row in enumerate(rows):
                if substep.valid is not None:
                    assert np.array_equal(substep.valid[joined_row, envs], valid[row])
                assert np.array_equal(substep.agent_ids[joined_row, envs][valid[row]], part.agent_ids[row][valid[row]])
                for target, source in (
                    (substep.observations, part.observations),
                    (substep.actions, part.actions),
                    (substep.logits, part.logits),
                ):
                    for head, array in source.items():
                        assert np.array_equal(target[head][joined_row, envs][valid[row]], array[row][valid[row]])
        last = [entry for entry in joined.final_observations if entry.env_index // 2 == actor]
        assert [(e.tick, e.env_index - 2 * actor) for e in last] == [
            (first_tick + e.tick, e.env_index) for e in packet.final_observations
        ]
        for index, actor_id in enumerate(packet.last_actor_ids):
            assert joined.last_actor_ids[2 * actor + index] == actor_id
            for key, array in packet.substeps[actor_id.step_key].observations.items():
                own = joined.last_observations[actor_id.step_key][key][2 * actor + index]
                assert np.array_equal(own, array[-1, index])


@pytest.mark.parametrize("name", ["flat", "hierarchical"])
def test_processes_collect_what_a_single_actor_collects_in_process(name):
    factory = ENVS[name]
    actors = subproc(factory, make_policy(factory), n_actors=1, batch_size=1, envs_per_actor=2)
    local_policy = make_policy(factory)
    local = SequentialDistributedActors(factory, local_policy, 4, 1, 1, [0, 1], envs_per_actor=2)
    try:
        local_policy.seed(0)  # as actor 0 is seeded
        for _ in range(3):
            there, here = actors.collect_batch().columns, local.collect_batch().columns
            assert np.array_equal(there.rewards, here.rewards)
            assert there.actor_sequence == here.actor_sequence
            for key, substep in here.substeps.items():
                for head, array in substep.actions.items():
                    assert np.array_equal(there.substeps[key].actions[head], array)
    finally:
        actors.stop()
        local.stop()


def test_the_documented_record_is_stacked_over_steps_and_rollouts():
    actors = SequentialDistributedActors(counting_env, make_policy(counting_env), 5, 2, 3, [1, 2])
    record, before, after, seconds = actors.collect_outputs("cpu")
    assert record.batch_shape == [5, 3]
    assert isinstance(record.rewards[0], torch.Tensor)
    assert record.observations[0]["count"].shape == (5, 3, 2)
    assert record.logits[0]["move"].shape == (5, 3, 5)
    assert record.rewards[0][:, 0].tolist() == [1, 2, 3, 1, 2]
    assert (before, after) == (0, 0)
    assert seconds > 0
    kept = record.rewards[0].clone()
    actors.collect_outputs("cpu")
    assert torch.equal(record.rewards[0], kept)  # the next batch does not overwrite it
    actors.stop()


@pytest.mark.parametrize("kind", ["sequential", "subproc"])
def test_episodes_of_all_actors_are_counted(kind):
    policy = make_policy(counting_env)
    if kind == "sequential":
        actors: Any = SequentialDistributedActors(counting_env, policy, 6, 2, 2, [1, 2])
    else:
        actors = subproc(counting_env, policy, n_rollout_steps=6, queue_out_of_sync_factor=0.0)
    actors.collect_batch()
    actors.write_epoch_stats()
    assert actors.get_stats_value(BaseEnvEvents.reward, LogStatsLevel.EPOCH, "mean") == 6.0
    count = actors.get_stats_value(BaseEnvEvents.reward, LogStatsLevel.EPOCH, "episode_count")
    # Two episodes in each rollout, two rollouts in the batch; actors in processes may be a rollout ahead already.
    assert count == 4 if kind == "sequential" else count in (4, 6, 8)
    assert actors.get_epoch_stats_aggregator() is actors.epoch_stats
    actors.stop()


def test_actors_use_a_broadcast_policy():
    policy = make_policy(counting_env)
    actors = subproc(counting_env, policy, queue_out_of_sync_factor=0.0)
    actors.start()
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.zero_()
        policy.networks[0].layers["move"].bias[3] = 100.0
    actors.broadcast_updated_policy(policy.state_dict())
    assert actors._tickets.version == 1
    lags = [actors.collect_batch().policy_lags for _ in range(3)]
    assert lags[0] in ([1, 1], [0, 1], [1, 0], [0, 0])
    assert lags[2] == [0, 0]
    columns = actors.collect_batch().columns
    assert set(columns.substeps[0].actions["move"].flatten()) == {3}
    assert columns.substeps[0].logits["move"][0, 0].tolist() == [0, 0, 0, 100, 0]
    actors.stop()


@pytest.mark.long
def test_no_batch_is_older_than_the_factor_allows():
    policy = make_policy(counting_env)
    actors = subproc(counting_env, policy, n_actors=3, batch_size=2, queue_out_of_sync_factor=0.5)
    bound = 0.5 + 3 / 2
    for _ in range(12):
        assert max(actors.collect_batch().policy_lags) <= bound
        actors.broadcast_updated_policy(policy.state_dict())
    actors.stop()


def test_batches_note_that_environments_begin_anew():
    make_env = ENVS["flat"]
    actors, other = (
        SequentialDistributedActors(
            make_env, make_policy(make_env), 4, n_actors=2, batch_size=2, actor_env_seeds=[0, 1]
        )
        for _ in range(2)
    )
    assert [actors.collect_batch().columns.renewed for _ in range(2)] == [[0, 1], []]
    other.load_state_dict(actors.state_dict())
    assert other.collect_batch().columns.renewed == [], "its environments are where the others were"
    actors.stop()
    assert [actors.collect_batch().columns.renewed for _ in range(2)] == [[0, 1], []]


@pytest.mark.long
def test_actors_started_again_play_other_episodes():
    for actors in (
        SequentialDistributedActors(random_walk_env, make_policy(random_walk_env), 4, 1, 1, [1]),
        subproc(random_walk_env, n_actors=1, batch_size=1),
    ):
        first = actors.collect_batch().columns.rewards.copy()
        actors.stop()
        actors.stop()
        assert not np.array_equal(actors.collect_batch().columns.rewards, first)
        actors.stop()


# -- failures ---------------------------------------------------------------------------------------

LONG = ((1000, "terminated"),)


def faulty(name: str) -> SubprocDistributedActors:
    return subproc(partial(counting_env, LONG, (name, 6)), make_policy(counting_env))


def collect_many(actors: SubprocDistributedActors) -> None:
    for _ in range(200):
        actors.collect_batch()


def collect_until_it_fails(actors: SubprocDistributedActors) -> tuple[Any, float]:
    actors.start()
    workers = actors._groups.pool.workers
    start = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        collect_many(actors)
    assert not any(worker.process.is_alive() for worker in workers)
    return caught.value, time.monotonic() - start


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("raise", "raised ValueError: the simulator lost its marbles in environment .* during `collect`"),
        # A process that ends at once may not have sent its answer to the call before: `receive`, of shared memory.
        ("hard_exit", "exited with code 4 during `(collect|receive)`"),
        ("kill", r"was killed by signal 9 \(SIGKILL\) during `(collect|receive)`"),
    ],
)
def test_a_failing_actor_becomes_one_error_at_once(fault, expected):
    actors = faulty(fault)
    error, seconds = collect_until_it_fails(actors)
    with pytest.raises(EnvWorkerError, match=expected):
        raise error
    assert seconds < 5.0
    actors.stop()


def collect_slowly(actors: SubprocDistributedActors) -> None:
    for _ in range(5):
        actors.collect_batch()
        time.sleep(0.5)  # the actors fail after the first batch, with unread rollouts in their pipes
        actors.broadcast_updated_policy(actors.policy.state_dict())


@pytest.mark.parametrize(
    ("fault", "error_type", "expected"),
    [
        ("raise", EnvWorkerError, "raised ValueError: the simulator lost its marbles"),
        ("nan", NonFiniteError, r"Actor \d, environment 0.*reward is nan"),
    ],
)
def test_an_actor_failure_during_a_learner_update_is_reported(fault, error_type, expected):
    actors = faulty(fault)
    with pytest.raises(error_type, match=expected):
        collect_slowly(actors)
    actors.stop()


class WideCoreEnv(RandomWalkCoreEnv):
    def get_maze_state(self):
        return {"position": np.full(30_000, self.position[0], np.float32)}


def wide_env():
    observation = gym.spaces.Dict({"position": gym.spaces.Box(-np.inf, np.inf, (30_000,), np.float32)})
    action = gym.spaces.Dict({"push": gym.spaces.Box(-1, 1, (3,), np.float32)})
    return MazeEnv(WideCoreEnv(), {0: PassOn(action)}, {0: Observe(observation)})


def test_actors_with_unread_large_rollouts_continue_and_end_at_once():
    actors = subproc(wide_env, n_actors=1, batch_size=1, queue_out_of_sync_factor=3.0)
    actors.collect_batch()
    time.sleep(1.0)  # long enough for all rollouts that may wait; each is larger than a pipe holds
    (worker,) = actors._groups.pool.workers
    start = time.monotonic()
    actors.stop()
    assert time.monotonic() - start < 1.5
    assert worker.process.exitcode == 0  # it was not killed


def test_an_actor_killed_from_outside_is_named():
    actors = subproc(partial(counting_env, LONG), make_policy(counting_env))
    actors.collect_batch()
    os.kill(actors._groups.pool.workers[1].process.pid, signal.SIGKILL)
    error, _ = collect_until_it_fails(actors)
    assert "environment worker 1 " in str(error)
    assert "signal 9" in str(error)
    actors.stop()


def test_stop_returns_in_time_with_a_hanging_and_a_dead_actor():
    actors = faulty("hang")
    actors.start()
    workers = actors._groups.pool.workers
    os.kill(workers[0].process.pid, signal.SIGKILL)
    start = time.monotonic()
    actors.stop()
    assert time.monotonic() - start < 5.0
    assert not any(worker.process.is_alive() for worker in workers)


class NotANumber(nn.Module):
    def forward(self, x: Any) -> Any:
        observed = x["position"]
        return {"push": torch.full((*observed.shape[:-1], 3, 2), torch.nan)}


@pytest.mark.parametrize("kind", ["sequential", "subproc"])
def test_a_number_that_is_not_finite_names_its_place(kind):
    policy = make_policy(random_walk_env)
    with torch.no_grad():
        next(iter(policy.parameters())).fill_(torch.nan)
    if kind == "sequential":
        actors: Any = SequentialDistributedActors(random_walk_env, policy, 4, 1, 1, [1])
    else:
        actors = subproc(random_walk_env, policy)
    with pytest.raises(NonFiniteError, match="push"):
        actors.collect_batch()
    actors.stop()


@pytest.mark.long
def test_workers_leave_when_the_learner_is_killed(tmp_path):
    script = tmp_path / "learner.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, signal
            from tests.train.parallelization.test_distributed_actors import counting_env, subproc
            actors = subproc(counting_env)
            actors.collect_batch()
            print(*(worker.process.pid for worker in actors._groups.pool.workers), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
            """
        )
    )
    finished = subprocess.run(
        [sys.executable, str(script)],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": "."},
    )
    pids = [int(pid) for pid in finished.stdout.split()]
    assert len(pids) == 2, finished.stderr
    deadline = time.monotonic() + 5.0
    while any(is_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(is_alive(pid) for pid in pids)


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


# -- arguments --------------------------------------------------------------------------------------


def test_wrong_arguments_are_refused():
    policy = make_policy(counting_env)
    with pytest.raises(ValueError, match=r"one seed for each of the 2 environments, found \[1\]"):
        SequentialDistributedActors(counting_env, policy, 4, 2, 2, [1])
    with pytest.raises(ConfigError, match=r"start_method: expected one of .*, found 'dummy'"):
        SubprocDistributedActors.get_multiprocessing_context("dummy")
    assert SubprocDistributedActors.get_multiprocessing_context("spawn").get_start_method() == "spawn"


# -- broadcasting -----------------------------------------------------------------------------------


def test_container_counts_versions_and_keeps_the_newest_policy():
    container = BroadcastingContainer()
    assert (container.policy_version(), container.policy_state_dict(), container.stop_flag()) == (0, {}, False)
    container.set_policy_state_dict({"w": 1})
    container.set_policy_state_dict({"w": 2}, aux_data={"step": 7})
    container.set_stop_flag()
    assert (container.policy_version(), container.policy_state_dict()) == (2, {"w": 2})
    assert container.aux_data() == {"step": 7}
    assert container.stop_flag()


def test_manager_serves_the_container_to_other_processes():
    with BroadcastingManager() as manager:
        container = manager.BroadcastingContainer()
        container.set_policy_state_dict({"w": 3})
        assert container.policy_version() == 1
        assert container.policy_state_dict() == {"w": 3}
