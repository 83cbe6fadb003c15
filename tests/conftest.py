"""Settings that hold for all tests, and what several modules look at."""

import gc
import multiprocessing
import os
import pickle
from multiprocessing import forkserver
from pathlib import Path

import pytest
import yaml
from hydra.core.config_store import ConfigStore
from hypothesis import settings

# A first call may import half of torch, so examples have no deadline.
settings.register_profile("maze", deadline=None, max_examples=40)
settings.load_profile("maze")

IMPORTS_OF_WORKERS = (
    "maze.cli.launchers",
    "maze.core.rollout.parallel_rollout_runner",
    "maze.core.trajectory_recording.datasets.in_memory_dataset",
    "maze.core.utils.worker_pool",
    "maze.train.parallelization.distributed_actors.env_groups",
    "maze.train.trainers.common.training_runner",
)


SLOW_TESTS = frozenset((Path(__file__).parent / "slow_tests.txt").read_text("utf-8").split())


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the tests that `slow_tests.txt` lists."""
    if item.nodeid.partition("[")[0] in SLOW_TESTS:
        item.add_marker("slow")


@pytest.hookimpl(trylast=True)  # what is deselected is gone
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Each worker gets an equal part of the list: slow modules are dealt out and come first, to leave no long tail."""
    if not hasattr(config, "workerinput"):
        return
    modules: dict[Path, list[pytest.Item]] = {}
    for item in items:
        modules.setdefault(item.path, []).append(item)
    n_slow = {
        path: sum(not {"slow", "long"}.isdisjoint(item.keywords) for item in module) for path, module in modules.items()
    }
    slow = sorted((path for path in modules if n_slow[path]), key=lambda path: -n_slow[path])
    parts: list[list[pytest.Item]] = [[] for _ in range(config.workerinput["workercount"])]
    loads = [0] * len(parts)
    for path in slow:
        part = loads.index(min(loads))
        loads[part] += n_slow[path]
        parts[part].extend(modules[path])
    for path, module in modules.items():
        if not n_slow[path]:
            min(parts, key=len).extend(module)
    items[:] = [item for part in parts for item in part]


def pytest_configure(config: pytest.Config) -> None:
    """Collect no garbage while tests are collected: it would take a third of that time."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        gc.disable()


def pytest_collection_finish() -> None:
    """Keep the collected tests and modules out of garbage collections, each of which would traverse them."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _imports_shared_by_worker_processes():
    """Import torch once for the worker processes of all tests; otherwise it takes each of them more than a second."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        from maze.utils.process import preload

        preload(multiprocessing.get_context("forkserver"), IMPORTS_OF_WORKERS)
        forkserver.ensure_running()


@pytest.fixture(scope="session", autouse=True)
def _configurations_parsed_once():
    """Hydra parses some thirty files for each command, the same ones in hundreds of tests: here each text once."""
    parsed = {}

    def load(stream, Loader):
        text = stream if isinstance(stream, str | bytes) else stream.read()
        key = (text, Loader.__module__, Loader.__qualname__)
        if key not in parsed:
            if stream is not text:
                stream.seek(0)  # and not the text: errors name the file
            parsed[key] = pickle.dumps(parse(stream, Loader))
        return pickle.loads(parsed[key])

    class Shared(dict):
        """Options in Python, which each composition would copy as a whole, and not only those that it takes."""

        def __deepcopy__(self, memo):
            return self

    store = ConfigStore.instance()
    with pytest.MonkeyPatch.context() as patch:
        parse = yaml.load
        patch.setattr(yaml, "load", load)
        patch.setattr(store, "repo", Shared(store.repo))
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_waiting_for_the_disk():
    """Leave the writing of files to the operating system: only after a power failure would their content differ.

    A short training flushes thirty files, 5 ms each.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run on CartPole-v1, one epoch of A2C; to be read or copied, not to be written into."""
    from maze.maze_cli import main

    directory = tmp_path_factory.mktemp("trained") / "run"
    few_steps = ("algorithm.n_epochs=1", "algorithm.epoch_length=1", "algorithm.n_rollout_steps=4")
    small = ("runner.concurrency=2", "algorithm.rollout_evaluator.n_episodes=1")
    # some initial networks balance the pole by chance
    seeds = ("seeding.env_base_seed=1", "seeding.agent_base_seed=1")
    training = ("-cn", "conf_train", "env.name=CartPole-v1", "algorithm=a2c", *few_steps, *small, *seeds)
    assert main([*training, f"hydra.run.dir={directory}"]) == 0
    return directory
