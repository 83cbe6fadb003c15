"""Runs on a cluster of two nodes on this machine: equal results, replacement of lost actors and nodes."""

from __future__ import annotations

import contextlib
import csv
import functools
import importlib.util
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from maze.api.run_context import RunContext
from maze.core.errors import ConfigError, NonFiniteError, WorkerError
from maze.core.log_stats.log_stats import LogStatsAggregator, LogStatsLevel
from maze.core.rollout.rollout_generator import RolloutGenerator
from maze.core.utils.config_utils import EnvFactory
from maze.core.utils.update_profile import COLLECTING, LEARNING, TRANSFER, WAITING
from maze.core.utils.worker_pool import ClusterEvents
from maze.core.utils.worker_process import unpicklable
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.maze_cli import main
from maze.train.parallelization.distributed_actors.distributed_actors import RolloutTickets
from maze.train.parallelization.distributed_actors.env_groups import FirstFragments
from maze.train.parallelization.on_ray.cluster import ActorPool, ray_session, require_ray
from maze.train.parallelization.on_ray.ray_placement import OnRay
from maze.train.parallelization.placement import InProcess
from tests.cli.sweep_stub import write_root_config
from tests.core.utils.test_update_profile import parts_of_a_run
from tests.s3_server import S3Server, StoredObject
from tests.train.parallelization.placements import differing, recorded_by, trained
from tests.train.parallelization.toy_envs import counting_env, random_walk_env, slow_third_env
from tests.train.parallelization.toy_policies import ENVS, make_policy

has_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray")
on_cluster = [pytest.mark.long, pytest.mark.ray, has_ray, pytest.mark.filterwarnings("ignore")]

SMALL = {
    "ppo": ["algorithm.n_rollout_steps=20", "runner.concurrency=3"],
    "sac": [
        "critic=flatten_concat_state_action",
        "algorithm.initial_buffer_size=20",
        "algorithm.num_actors=2",
        "algorithm.batch_size=8",
        "algorithm.rollouts_per_iteration=2",
        "algorithm.collect_ahead=false",
    ],
    "es": ["algorithm.n_rollouts_per_update=6", "runner.n_eval_rollouts=2", "algorithm.max_steps=20"],
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Cluster of two nodes with two CPUs each; all tests of this module use it."""
    import ray
    from ray.cluster_utils import Cluster

    health = {"period_ms": "500", "timeout_ms": "1000", "failure_threshold": "3", "initial_delay_ms": "500"}
    set_here = {f"RAY_health_check_{name}": value for name, value in health.items()} | {"RAY_AUTH_MODE": "disabled"}
    # machines of a cluster have credentials of their own, and a place for copies
    set_here |= {f"AWS_{name}": "true" for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "EC2_METADATA_DISABLED")}
    set_here |= {"XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}
    before = {name: os.environ.get(name) for name in set_here}
    os.environ.update(set_here)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    no_services = {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
    head = {"num_cpus": 2, "object_store_memory": 200 * 2**20, **no_services}
    two = Cluster(initialize_head=True, head_node_args=head)
    two.add_node(num_cpus=2, object_store_memory=200 * 2**20)
    ray.init(address=two.address, log_to_driver=False)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    yield two
    ray.shutdown()
    two.shutdown()
    for name, value in before.items():
        os.environ.pop(name, None) if value is None else os.environ.update({name: value})


@pytest.fixture
def placement(cluster: Any) -> Iterator[Callable[..., OnRay]]:
    """Makes placements, and ends their actors."""
    made: list[OnRay] = []

    def make(env_groups: int = 2, **arguments: Any) -> OnRay:
        made.append(OnRay(**arguments))
        made[-1].env_groups = env_groups
        return made[-1]

    yield make
    for one in made:
        one.close()


def work_of(pool: ActorPool, event: Callable[..., Any]) -> float:
    """Return one statistic of what the actors have done since the last call."""
    statistics = LogStatsAggregator(LogStatsLevel.EPOCH)
    pool.report_work(statistics)
    statistics.reduce()
    return float(statistics.last_value(event))


def pids_of(pool: ActorPool) -> list[int]:
    """Processes of a pool's actors."""
    import ray

    return [found["pid"] for found in ray.get([actor.handle.describe.remote() for actor in pool._actors])]


SEEDS = ["seeding.env_base_seed=1", "seeding.agent_base_seed=2"]


def files_below(run: Path) -> set[str]:
    """Names of what rollouts have recorded; they hold the seeds."""
    directories = ("trajectory_data", "action_records")
    return {str(path.relative_to(run)) for name in directories for path in (run / name).rglob("*") if path.is_file()}


def kill_a_busy_actor(killed: threading.Event) -> None:
    """Kills the first actor that comes, once it has begun to work."""
    import psutil

    while not killed.is_set():
        time.sleep(0.05)
        for process in psutil.process_iter(["name", "cmdline"]):
            if "ray::Host.call" in " ".join(process.info["cmdline"] or []):
                process.kill()
                killed.set()
                return


# -- the same results ---------------------------------------------------------------------------------


class TestSameResults:
    pytestmark = on_cluster

    def test_remote_groups_report_the_statistics_of_groups_in_this_process(
        self, placement: Callable[..., OnRay]
    ) -> None:
        there, here = placement(), InProcess()
        here.env_groups = 2
        for name in ENVS:
            assert recorded_by(there, name) == recorded_by(here, name), name

    @pytest.mark.parametrize("name", SMALL)
    def test_runs_end_with_the_same_tensors(self, cluster: Any, tmp_path: Path, name: str) -> None:
        options = [f"algorithm={name}", *SMALL[name]]
        here = trained(tmp_path / "dev", *options, "runner=dev", "runner.env_groups=2")
        there = trained(tmp_path / "ray", *options, "runner=ray", "runner.env_groups=2", "runner.address=auto")
        assert len(here) > 10
        # what the actors did belongs to the statistics, and to nothing that is learned
        output = (tmp_path / "ray" / "progress.csv").read_text()
        for what in ("actor_restarts", "actors_busy", "calls_per_second", "learner_waiting"):
            assert what in output
        assert "object_store_megabytes" in output
        assert not differing(here, there)

    def test_a_run_writes_its_update_profile(self, cluster: Any, tmp_path: Path) -> None:
        parts = parts_of_a_run(tmp_path / "run", "runner=ray", "runner.address=auto", "runner.env_groups=2")
        assert parts >= {COLLECTING, WAITING, TRANSFER, LEARNING}

    def test_impala_trains_and_resumes(self, cluster: Any, tmp_path: Path) -> None:
        options = ["algorithm=impala", "runner=ray", "algorithm.num_actors=1", "algorithm.actors_batch_size=2"]
        first = trained(tmp_path / "first", *options)
        resumed = ["algorithm.n_epochs=3", f"input_dir={tmp_path / 'first'}", "resume=true", "algorithm.num_actors=2"]
        second = trained(tmp_path / "second", *options, *resumed)
        changed = [place for place in differing(first, second) if place.startswith("/model")]
        assert changed

    def test_rollouts_deliver_every_episode_once_although_an_actor_is_killed(
        self, cluster: Any, tmp_path: Path
    ) -> None:
        killed = threading.Event()
        threading.Thread(target=kill_a_busy_actor, args=(killed,), daemon=True).start()
        common = ["env.name=CartPole-v1", "runner.n_episodes=24", "runner.record_actions=true", *SEEDS]
        for runner in ("sequential", "ray"):
            more = ["runner.env_groups=2", "runner.address=auto"] if runner == "ray" else []
            assert main([*common, f"runner={runner}", *more, f"hydra.run.dir={tmp_path / runner}"]) == 0
        here, there = [files_below(tmp_path / runner) for runner in ("sequential", "ray")]
        assert len([name for name in here if name.startswith("trajectory_data")]) == 24
        assert here == there
        assert killed.is_set()

    def test_rollouts_take_their_policy_from_a_bucket(self, cluster: Any, trained_run: Path, tmp_path: Path) -> None:
        pytest.importorskip("pyarrow.fs")
        few = ["runner.n_episodes=8", "runner.record_actions=true", "runner.max_episode_steps=20", *SEEDS]
        common = ["env.name=CartPole-v1", "policy=torch_policy", *few]
        with S3Server() as server:
            server.buckets["runs"] = {
                f"trained/{path.relative_to(trained_run)}": StoredObject(path.read_bytes())
                for path in trained_run.rglob("*")
                if path.is_file()
            }
            url = f"s3://runs/trained?{server.options}"
            for runner in ("sequential", "ray"):
                more = ["runner.env_groups=1", "runner.address=auto"] if runner == "ray" else []
                run = [f"runner={runner}", *more, f"input_dir={url}", f"hydra.run.dir={tmp_path / runner}"]
                assert main([*common, *run]) == 0
            here, there = [files_below(tmp_path / runner) for runner in ("sequential", "ray")]
            assert len([name for name in here if name.startswith("action_records")]) == 8
            assert here == there
            nothing = [f"input_dir={url.replace('trained', 'nothing')}", f"hydra.run.dir={tmp_path / 'nothing'}"]
            assert main([*common, "runner=ray", "runner.address=auto", *nothing]) == 1

    def test_run_context_accepts_ray_and_environments_defined_in_a_script(self, cluster: Any, tmp_path: Path) -> None:
        class OfAScript(GymMazeEnv):
            pass

        small = {"algorithm.epoch_length": 1, "algorithm.n_rollout_steps": 5, "algorithm.rollout_evaluator": None}
        where = {"runner.env_groups": 1, "runner.address": "auto", "runner.concurrency": 1}
        with RunContext(
            env=lambda: OfAScript("CartPole-v1"),
            algorithm="a2c",
            runner="ray",
            run_dir=str(tmp_path),
            silent=True,
            overrides={**small, **where},
        ) as run:
            run.train(n_epochs=1)
        assert (tmp_path / "latest.pt").is_file()


# -- not waiting for all ------------------------------------------------------------------------------


class TestFirstFragments:
    pytestmark = on_cluster

    def test_a_slow_group_is_not_waited_for_and_loses_no_step(self, placement: Callable[..., OnRay]) -> None:
        there = placement(env_groups=3, wait_for=0.6)
        policy = make_policy(slow_third_env)
        for max_age in (0, 100):
            there.max_fragment_age = max_age
            env: Any = there.vector_env(slow_third_env, 3, "train")
            env.seed([0, 1, 3])
            generator = RolloutGenerator(env, record_logits=True)
            columns = generator.allocate(5, policy)
            assert columns.n_envs == 2
            seen: dict[int, list[int]] = {number: [] for number in (0, 1, 3)}
            for _ in range(40):
                generator.collect(policy, columns)
                numbers, times = columns.substeps[0].observations["count"][:5].astype(int).transpose(2, 1, 0)
                for number, of_env in zip(numbers[:, 0].tolist(), times.tolist(), strict=True):
                    seen[number] += of_env
            late = [age for age in env._ages if age]
            assert late
            if max_age:  # each fragment continues the one before and is delivered once
                for times_of_env in seen.values():
                    assert times_of_env == list(range(len(times_of_env)))
                assert len(seen[3]) >= 5
            env.write_epoch_stats()
            output = {str(key.event.__name__): value for key, value in env.epoch_stats.last_stats.items()}
            assert output["fragments_dropped"] == (len(late) if max_age == 0 else 0)

    def test_ppo_learns_from_the_first_fragments(self, cluster: Any, tmp_path: Path) -> None:
        where = ["runner=ray", "runner.env_groups=3", "runner.address=auto", "runner.placement.wait_for=0.6"]
        trained(tmp_path, "algorithm=ppo", *SMALL["ppo"], *where)
        with open(tmp_path / "progress.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        assert {row["env_steps"] for row in rows if row["env_steps"]} >= {"80", "160"}  # 2 of 3 environments, 20 steps
        assert any("fragment_age" in key for key in rows[0])


# -- what vanishes ------------------------------------------------------------------------------------


class TestFailures:
    pytestmark = on_cluster

    def test_a_killed_actor_is_replaced_and_costs_its_rollout_only(
        self, placement: Callable[..., OnRay], caplog: pytest.LogCaptureFixture
    ) -> None:
        there = placement()
        env = there.vector_env(random_walk_env, 4)
        env.seed([1, 2, 3, 4])
        generator, policy = RolloutGenerator(env), make_policy(random_walk_env)
        columns = generator.allocate(200)
        generator.collect(policy, columns)
        pool = there.actor_pool(2)
        victim = pids_of(pool)[1]
        killer = threading.Timer(0.05, os.kill, (victim, signal.SIGKILL))
        killer.start()
        with caplog.at_level(logging.WARNING):
            for _ in range(5):
                generator.collect(policy, columns)
        killer.join()
        assert columns.rewards.shape == (200, 4)
        assert (columns.rewards[-1] != 0).all()
        assert pool.n_restarts == 1
        assert f"Actor 1 (pid {victim} on " in caplog.text
        assert victim not in pids_of(pool)

    def test_an_environment_that_fails_repeatedly_ends_the_run_with_its_place(
        self, placement: Callable[..., OnRay]
    ) -> None:
        there = placement(env_groups=1, max_restarts=1, restart_pause=0.1)
        env = there.vector_env(partial(counting_env, fault=("nan", 2)), 1)
        columns = RolloutGenerator(env).allocate(4)
        with pytest.raises(NonFiniteError, match="Actor 0: Group 0, environment 0, tick 1"):
            env.roll_out(make_policy(counting_env), columns, begins=True)
        assert there.actor_pool(1).n_restarts == 0  # a number that is not finite is raised immediately
        env = there.vector_env(partial(counting_env, fault=("raise", 2)), 1)
        env.seed([7])
        columns = RolloutGenerator(env).allocate(4)
        with pytest.raises(WorkerError, match=r"environment 0, .*seeded with .*consecutive failure 2.*max_restarts=1"):
            env.roll_out(make_policy(counting_env), columns, begins=True)

    def test_a_simulator_that_hangs_is_ended_and_named(self, placement: Callable[..., OnRay]) -> None:
        there = placement(env_groups=1, max_restarts=0)
        there.env_timeout = 0.5
        env = there.vector_env(EnvFactory(partial(counting_env, fault=("hang", 2)), timeout=0.5), 1)
        env.seed([7])
        columns = RolloutGenerator(env).allocate(4)
        with pytest.raises(WorkerError, match=r"Actor 0 failed.*environment 0.*0\.5 s"):
            env.roll_out(make_policy(counting_env), columns, begins=True)

    def test_actors_without_resources_are_counted(self, cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("maze.train.parallelization.on_ray.cluster._WAIT_LOG_SECONDS", 1.0)
        pool = ActorPool(OnRay(start_timeout=1.0, cpus_per_actor=5))
        expected = r"2 of 2 actors have not started yet; each needs 5 CPUs, and the Ray cluster has 4 CPUs"
        with closing(pool), pytest.raises(ConfigError, match=expected):
            pool.grow(2)

    def test_a_lost_node_does_not_end_the_run(self, cluster: Any, placement: Callable[..., OnRay]) -> None:
        extra = cluster.add_node(num_cpus=2, object_store_memory=200 * 2**20)
        there = placement(env_groups=4)
        env = there.vector_env(random_walk_env, 4)
        env.seed([1, 2, 3, 4])
        generator, policy = RolloutGenerator(env), make_policy(random_walk_env)
        columns = generator.allocate(50)
        generator.collect(policy, columns)
        cluster.remove_node(extra, allow_graceful=False)
        for _ in range(2):
            generator.collect(policy, columns)
        assert (columns.rewards[-1] != 0).all()

    def test_a_node_that_joins_replaces_a_lost_one(self, cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("maze.train.parallelization.on_ray.cluster._WAIT_LOG_SECONDS", 1.0)
        machine = {"num_cpus": 2, "object_store_memory": 200 * 2**20}
        extra = cluster.add_node(**machine)
        pool = ActorPool(OnRay(cpus_per_actor=2))

        def lose(node: Any) -> None:
            pids = pids_of(pool)
            cluster.remove_node(node, allow_graceful=False)
            for actor, pid in zip(pool._actors, pids, strict=True):
                if actor.node.endswith(node.node_id[:6]):  # it would not notice at once that its machine is gone
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)

        try:
            pool.grow(3)
            pool.host("echo", lambda actor, n_starts: Echo, 3)
            assert pool.call("echo", "say", [(1,), (2,), (3,)]) == [1, 2, 3]
            lose(extra)
            tasks = [pool.submit(actor, "echo", "say", actor) for actor in range(3)]
            assert len(pool.finished(tasks, 2)) == 2
            extra = cluster.add_node(**machine)
            assert [task.result for task in pool.finished(tasks, 3)] == [0, 1, 2]
            assert pool.n_restarts == 1
            lose(extra)
            pool._limits.start_timeout = 2.0  # no free CPUs for the replacement
            with pytest.raises(ConfigError, match=r"1 of 3 actors have not started yet.*limit is 2 seconds"):
                pool.call("echo", "say", [(1,), (2,), (3,)])
        finally:
            pool.close()

    def test_an_actor_that_dies_while_it_starts_is_replaced(
        self, cluster: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pool, started = ActorPool(OnRay()), []
        start = pool._start

        def start_and_lose_the_first(actor: Any) -> None:
            start(actor)
            started.append(actor)
            if len(started) == 1:
                pool._kill(actor)

        monkeypatch.setattr(pool, "_start", start_and_lose_the_first)
        try:
            pool.grow(1)
            assert len(started) == 2
            assert pids_of(pool)
        finally:
            pool.close()


# -- machines that join -------------------------------------------------------------------------------


class Echo:
    def say(self, word: int) -> int:
        return word

    def wait(self, word: int) -> int:
        time.sleep(0.05)
        return os.getpid()

    def close(self) -> None: ...


class TestMachinesThatJoin:
    pytestmark = on_cluster

    @pytest.fixture
    def pool_of_all(self, cluster: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[ActorPool]:
        """Actors that take up the whole cluster; one more may join."""
        monkeypatch.setattr("maze.train.parallelization.on_ray.cluster._WAIT_LOG_SECONDS", 0.2)
        pool = ActorPool(OnRay(cpus_per_actor=2, max_actors=3))
        pool.grow(2)
        yield pool
        pool.close()

    @pytest.fixture
    def machine(self, cluster: Any) -> Iterator[Any]:
        nodes: list[Any] = []

        def join() -> Any:
            nodes.append(cluster.add_node(num_cpus=4, object_store_memory=200 * 2**20))
            return nodes[-1]

        yield join
        for node in nodes:
            if node in cluster.worker_nodes:
                cluster.remove_node(node)

    def test_added_actors_take_work_up_to_the_limit_and_others_redo_the_work_of_a_lost_actor(
        self, pool_of_all: ActorPool, machine: Any
    ) -> None:
        pool = pool_of_all
        pool.host("echo", lambda actor, n_starts: Echo)
        pieces = iter([(number,) for number in range(10_000)])
        stream = pool.hand_out("echo", "wait", lambda: next(pieces, None))

        def workers(n_wanted: int) -> int:
            seen, deadline = set[int](), time.monotonic() + 100
            while len(seen) < n_wanted and time.monotonic() < deadline:
                seen.add(next(stream)[1])
            return len(seen)

        assert workers(2) == pool.n_actors == 2
        machine()  # there is room for two
        assert workers(3) == pool.n_actors == 3
        for _ in range(40):
            next(stream)
        assert pool.n_actors == 3
        pool._limits.max_actors = 0  # it does not come back
        os.kill(pids_of(pool)[2], signal.SIGKILL)
        done = [next(stream)[0][0] for _ in range(40)]
        assert pool.n_restarts == 1
        assert len(set(done)) == 40
        assert work_of(pool, ClusterEvents.actors_there) == 2

    def test_impala_uses_rollouts_of_actors_added_later(
        self, cluster: Any, placement: Callable[..., OnRay], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("maze.train.parallelization.on_ray.cluster._WAIT_LOG_SECONDS", 0.2)
        others = ActorPool(OnRay(cpus_per_actor=2))  # when they end, there is room, as if a machine had joined
        others.grow(1)
        there, policy = placement(0, max_actors=3), make_policy(random_walk_env)
        actors: Any = there.actors(
            env_factory=random_walk_env,
            policy=policy,
            n_rollout_steps=5,
            n_actors=2,
            batch_size=2,
            queue_out_of_sync_factor=1.0,
            actor_env_seeds=[1, 2],
            actor_agent_seeds=[3, 4],
        )
        pool = there.actor_pool(2)
        taken: list[int] = []
        take = RolloutTickets.take
        monkeypatch.setattr(RolloutTickets, "take", lambda self, actor: (taken.append(actor), take(self, actor))[1])
        deadline = time.monotonic() + 100
        while 2 not in taken and time.monotonic() < deadline:
            batch = actors.collect_batch()
            assert batch.columns.rewards.shape == (5, 2)
            if pool.n_actors == 2 and len(taken) == 4:
                others.close()
            actors.broadcast_updated_policy(policy.state_dict())
        assert {0, 1, 2} == set(taken)
        actors.stop()


# -- sweeps -------------------------------------------------------------------------------------------


class TestSweeps:
    pytestmark = on_cluster

    def test_killed_job_counts_as_failed_and_the_sweep_continues(
        self, cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "events.json").write_text(json.dumps({"1": "kill", "2": "raise"}))
        options = ["--multirun", "seeding.env_base_seed=0", "hydra/launcher=ray", "hydra.launcher.address=auto"]
        assert main([*write_root_config(tmp_path), *options, "runner.x=1,2,3"]) == 0
        with open(tmp_path / "sweep" / "results.csv", newline="") as file:
            found = {row["runner.x"]: row["status"] for row in csv.DictReader(file)}
        assert found == {"1": "failed", "2": "failed", "3": "completed"}
        assert "the reactor is hot" in (tmp_path / "sweep" / "1" / "console.log").read_text()


# -- a Ray of its own ---------------------------------------------------------------------------------


@has_ray
@pytest.mark.long
@pytest.mark.ray
def test_a_signal_saves_the_run_and_leaves_no_process_of_ray(tmp_path: Path) -> None:
    import psutil

    few = ["algorithm.n_epochs=1000", "algorithm.patience=0", "algorithm.epoch_length=1"]
    few += ["algorithm.rollout_evaluator.n_episodes=2"]
    options = ["env.name=CartPole-v1", "algorithm=a2c", "runner=ray", "runner.env_groups=1", "runner.concurrency=2"]
    command = [sys.executable, "-m", "maze.maze_cli", "-cn", "conf_train", *options, *few]
    log, ours = tmp_path / "log", {**os.environ, "MAZE_TEST_OF": str(tmp_path), "RAY_AUTH_MODE": "disabled"}
    with open(log, "wb") as file:
        process = subprocess.Popen([*command, f"hydra.run.dir={tmp_path / 'run'}"], stdout=file, stderr=file, env=ours)
    deadline = time.monotonic() + 200
    while "epoch 1/1000" not in log.read_text() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143, log.read_text()
    assert "Its state is saved" in log.read_text()
    assert (tmp_path / "run" / "latest.pt").is_file()

    def left() -> list[str]:
        found = []
        for other in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if other.environ().get("MAZE_TEST_OF") == str(tmp_path):
                    found.append(" ".join(other.cmdline()))
        return found

    deadline = time.monotonic() + 10
    while left() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left() == []


# -- without a cluster --------------------------------------------------------------------------------


def test_fragments_of_different_sizes_cannot_replace_each_other() -> None:
    groups: Any = SimpleNamespace(pool=None)
    with pytest.raises(ConfigError, match=r"wait_for.*3 environments in 2 groups.*runner\.concurrency"):
        FirstFragments(groups, random_walk_env, [slice(0, 2), slice(2, 3)], "train", wait_for=0.5)


def test_without_ray_one_sentence_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(ConfigError, match=r'pip install "maze-rl\[ray\]>=1"'):
        OnRay().vector_env(random_walk_env, 2)


@has_ray
@pytest.mark.long
@pytest.mark.ray
@pytest.mark.filterwarnings("ignore")
def test_unreachable_address_is_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(require_ray(), "is_initialized", lambda: False)  # other tests' cluster may be there
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    start = time.monotonic()
    with pytest.raises(ConfigError, match=rf"runner.address: Ray at {address} could not be reached.*ray start"):
        ray_session({"address": address}, 1, key="runner.address").__enter__()
    assert time.monotonic() - start < 10
    with pytest.raises(ConfigError, match=r"7 to 12 times slower.*ray job submit"):
        ray_session({"address": "ray://head:10001"}, 1, key="runner.address").__enter__()


OWN_MODULE = """
import os, sys
import ray
from maze.train.parallelization.on_ray.cluster import ray_session

sys.path.append(sys.argv[1])  # as `maze-run` does with the working directory
before = os.environ.get("PYTHONPATH")
with ray_session({"object_store_memory": 100 * 2**20}, 1):
    print(ray.get(ray.remote(lambda: __import__("own_simulator").ANSWER).remote()))
assert os.environ.get("PYTHONPATH") == before
"""


@has_ray
@pytest.mark.long
@pytest.mark.ray
def test_workers_of_a_local_instance_import_the_users_modules(tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "own_simulator.py").write_text("ANSWER = 42\n")
    command = [sys.executable, "-c", OWN_MODULE, str(tmp_path / "project")]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert found.stdout.splitlines()[-1:] == ["42"], found.stderr


class TestBadInput:
    pytestmark = on_cluster

    def test_another_version_of_python_is_explained(self, monkeypatch: pytest.MonkeyPatch) -> None:
        @functools.wraps(require_ray().init)
        def init(**arguments: Any) -> None:
            raise RuntimeError("Version mismatch: The cluster was started with:\n    Ray: 2.60.0\n    Python: 3.9.1")

        monkeypatch.setattr(require_ray(), "is_initialized", lambda: False)
        monkeypatch.setattr(require_ray(), "init", init)
        with pytest.raises(ConfigError, match=r"Python: 3\.9\.1.*All machines of a cluster need the same versions"):
            ray_session({"address": "auto"}, 1, key="runner.address").__enter__()

    def test_a_node_that_does_not_start_in_time_is_explained(self, monkeypatch: pytest.MonkeyPatch) -> None:
        @functools.wraps(require_ray().init)
        def init(**arguments: Any) -> None:
            raise Exception("The current node timed out during startup.")  # as Ray does

        monkeypatch.setattr(require_ray(), "is_initialized", lambda: False)
        monkeypatch.setattr(require_ray(), "init", init)
        with pytest.raises(ConfigError, match=r"runner.address: .*timed out during startup.*memory of this machine"):
            ray_session({}, 1, key="runner.address").__enter__()

    def test_an_environment_that_cannot_be_pickled_names_the_attribute(self, placement: Callable[..., OnRay]) -> None:
        simulator = Simulator()
        with pytest.raises(ConfigError, match=r"env: it cannot be sent.*settings\['lock'\] \(lock\)"):
            placement().vector_env(lambda: counting_env(simulator), 2)


@has_ray
@pytest.mark.long
@pytest.mark.ray
def test_cluster_that_requires_a_token_is_reported(tmp_path: Path) -> None:
    output = run_on_cluster_of_its_own(tmp_path, "token")
    assert "RAY_AUTH_TOKEN" in output
    assert output.count("ConfigError") == 1


@has_ray
@pytest.mark.long
@pytest.mark.ray
def test_a_head_that_disappears_ends_the_run_with_its_state(tmp_path: Path) -> None:
    output = run_on_cluster_of_its_own(tmp_path, "head")
    assert "The head node of the Ray cluster at" in output
    assert "Its state is saved" in output
    assert (tmp_path / "run" / "latest.pt").is_file()


def run_on_cluster_of_its_own(directory: Path, fault: str) -> str:
    """Return the output of a run on a cluster with this fault, in a separate process group."""
    command = [sys.executable, str(Path(__file__).parent / "ray_fault_cluster.py"), fault, str(directory)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


class Simulator:
    def __init__(self) -> None:
        self.settings = {"speed": 1, "lock": threading.Lock()}


def test_unpicklable_parts_are_named() -> None:
    assert unpicklable(partial(np.add, Simulator())) != ""
    assert unpicklable({"env": Simulator()}) == "['env'].settings['lock'] (lock)"
