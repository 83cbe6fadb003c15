"""Run on a cluster with a fault and print the output.

    python ray_fault_cluster.py token|head <directory>

`token`: the cluster wants a token, and the training has none. `head`: once the training has begun, the head is killed.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

TRAIN = [
    "-cn",
    "conf_train",
    "env.name=CartPole-v1",
    "algorithm=a2c",
    "runner=ray",
    "runner.env_groups=1",
    "runner.concurrency=2",
    "algorithm.n_epochs=100000",
    "algorithm.epoch_length=1",
    "algorithm.patience=0",
    "algorithm.rollout_evaluator.n_episodes=2",
]


IMPATIENT = """
import sys
from maze.maze_cli import main
from maze.train.parallelization.on_ray import cluster

cluster._HEAD_SECONDS = 0.5
sys.exit(main())
"""
"""A command that checks the head more often."""
HEAD = {
    "num_cpus": 1,  # Ray starts as many workers beforehand, of which one is needed
    "object_store_memory": 100 * 2**20,
    "include_dashboard": False,
    "include_log_monitor": False,
    "no_monitor": True,
}


def main() -> None:
    """Starts the cluster, runs the training and ends both."""
    fault, directory = sys.argv[1], Path(sys.argv[2])
    # connecting is tried in vain for as many seconds
    without_token = {**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_NUM_REDIS_GET_RETRIES": "2"}
    os.environ["RAY_AUTH_MODE"] = "token" if fault == "token" else "disabled"
    os.environ["RAY_AUTH_TOKEN"] = "a-token-of-tests-that-is-long-enough"
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args=HEAD)
    try:
        log = directory / "log"
        command = [sys.executable, "-c", IMPATIENT, *TRAIN, f"runner.address={cluster.address}"]
        with open(log, "wb") as file:
            process = subprocess.Popen(
                [*command, f"hydra.run.dir={directory / 'run'}"], stdout=file, stderr=file, env=without_token
            )
        with_head = (
            psutil.Process(cluster.head_node.all_processes["gcs_server"][0].process.pid) if fault == "head" else None
        )
        deadline = time.monotonic() + 200
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.2)
            if with_head is not None and "epoch 1/" in log.read_text():
                with_head.send_signal(signal.SIGKILL)
                with_head = None
        if process.poll() is None:
            process.kill()
        print(log.read_text())
    finally:
        with contextlib.suppress(Exception):
            cluster.shutdown()


if __name__ == "__main__":
    main()
