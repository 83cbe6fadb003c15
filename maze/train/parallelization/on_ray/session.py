"""Connection to Ray for the duration of a run."""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from maze.core.errors import ConfigError, optional_package
from maze.utils.process import handlers_kept

logger = logging.getLogger(__name__)

_ADDRESS, _LOCAL = "RAY_ADDRESS", "local"
_CONNECT_SECONDS = 5.0
# Seconds between two checks of the head node of a cluster.
_HEAD_SECONDS = 5.0
# Number of consecutive failed checks after which the head node counts as lost.
_HEAD_FAILURES = 3
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",  # send no usage statistics
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
}


@contextmanager
def ray_session(
    ray_config: Mapping[str, Any] | None, n_cpus: float, log_level: str = "WARN", key: str = "runner.ray_config"
) -> Iterator[None]:
    """Return a context in which Ray runs: this process' instance, the cluster of an address, or a local instance.

    A cluster is joined only if its address is given, here or in the environment variable RAY_ADDRESS. On exit, only
    what this context has started is shut down.

    :param ray_config: Arguments of `ray.init`, such as `address`, `num_cpus` or `object_store_memory`.
    :param n_cpus: Number of CPUs needed; a local instance offers at least this number, whatever the machine has.
    :param log_level: Level of the loggers of Ray and RLlib.
    :param key: Configuration key of the arguments, for messages.
    :raises ConfigError: Ray cannot be reached, or an argument is wrong.
    """
    ray = require_ray()
    if ray.is_initialized():
        yield
        return
    config = {name: value for name, value in (ray_config or {}).items() if value is not None}
    address = config.get("address") or os.environ.get(_ADDRESS) or _LOCAL
    level = "WARNING" if log_level == "WARN" else log_level
    os.environ.update({name: value for name, value in _QUIET.items() if name not in os.environ})
    logging.getLogger("ray").setLevel(level)
    logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
    # the traceback of a failed worker is in its output only
    arguments: dict[str, Any] = {"logging_level": getattr(logging, level, logging.WARNING), "log_to_driver": True}
    if address == _LOCAL:
        arguments.update(include_dashboard=False, num_cpus=max(os.cpu_count() or 1, math.ceil(n_cpus)))
    _check_address(address, key)
    try:
        with handlers_kept():  # Ray ends the process at SIGTERM; a run has to save its state first
            ray.init(**{**arguments, **config, "address": address})
    except (TypeError, ValueError, RuntimeError, OSError) as error:
        advice = "Check the arguments of `ray.init` and the memory of this machine."
        if address != _LOCAL:
            advice = (
                "Is the cluster running (`ray status`), and does this machine reach it? All machines of a cluster need "
                "the same versions of Python, Ray and Maze. A cluster that was started with a token requires it: set "
                "RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or the file ~/.ray/auth_token."
            )
        raise ConfigError(_unreachable(error, address, key, advice)) from error
    ended = threading.Event()
    if address != _LOCAL:
        gcs = str(ray.get_runtime_context().gcs_address)
        threading.Thread(target=_watch_head, args=(gcs, ended), daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        ray.shutdown()


def _check_address(address: str, key: str) -> None:
    """Raise an error unless the address accepts connections; only for addresses with host and port."""
    if address.startswith("ray://"):
        raise ConfigError(
            f"{key}: {address} is an address of Ray Client, which makes calls 7 to 12 times slower. Start the run on "
            "a machine of the cluster (as a job: `ray job submit -- maze-run ...`) with `auto` or <host>:<port> "
            "instead."
        )
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        try:
            _connect(address)  # Ray itself would retry for a minute
        except OSError as error:
            advice = "`ray start --head` prints the address of its cluster, usually with port 6379."
            raise ConfigError(_unreachable(error, address, key, f"No server listens there: {advice}")) from error


def _watch_head(address: str, ended: threading.Event) -> None:
    """Terminate the run properly if the head node is lost: Ray would end this process after a minute, unlogged."""
    n_failures = 0
    while n_failures < _HEAD_FAILURES:
        if ended.wait(_HEAD_SECONDS):
            return
        try:
            _connect(address)
            n_failures = 0
        except OSError:
            n_failures += 1
    logger.error(
        "The head node of the Ray cluster at %s does not respond. The run saves its state and ends after the current "
        "update. Resume it with input_dir=<its directory> resume=true.",
        address,
    )
    os.kill(os.getpid(), signal.SIGTERM)


def _unreachable(error: Exception, address: str, key: str, advice: str) -> str:
    return f"{key}: Ray at {address} could not be reached: {' '.join(str(error).split())}. {advice}"


def _connect(address: str) -> None:
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()


def n_cpus() -> float:
    """Return the number of CPUs of the cluster."""
    return float(require_ray().cluster_resources().get("CPU", 0.0))


def require_cpus(n_needed: float, what: str, advice: str) -> None:
    """Check the number of CPUs of the cluster: Ray itself would wait forever.

    :param n_needed: Number of CPUs needed.
    :param what: The processes that need them, for the message.
    :param advice: How to use fewer CPUs, for the message.
    :raises ConfigError: The cluster has fewer CPUs.
    """
    if n_needed > n_cpus():
        raise ConfigError(f"{what} need {n_needed:g} CPUs, but the Ray cluster has {n_cpus():g}. {advice}")


def require_ray() -> Any:
    """Return the package `ray`, which is installed with an extra.

    :raises ConfigError: Ray is not installed.
    """
    return optional_package("ray", "ray", "Ray is not installed")
