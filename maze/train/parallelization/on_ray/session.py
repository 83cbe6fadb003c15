"""Ray for the time of a run."""

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

from maze.core.errors import ConfigError, did_you_mean, install_command
from maze.utils.process import handlers_kept

logger = logging.getLogger(__name__)

_ADDRESS, _LOCAL = "RAY_ADDRESS", "local"
_CONNECT_SECONDS = 5.0
_HEAD_SECONDS = 5.0
"""Pause between two looks after the head of a cluster."""
_HEAD_FAILURES = 3
"""After so many looks in a row at which it does not answer it is given up."""
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",  # nothing is reported to anybody
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
}


@contextmanager
def ray_session(
    ray_config: Mapping[str, Any] | None, n_cpus: float, log_level: str = "WARN", key: str = "runner.ray_config"
) -> Iterator[None]:
    """Context in which Ray runs: one that is there already, a cluster that is named, or a local one started for it.

    Nobody else's cluster is joined because it happens to run on this machine: it has to be named, here or in the
    environment variable RAY_ADDRESS. Only what this context has started is shut down when it is left.

    :param ray_config: Arguments of `ray.init`, such as `address`, `num_cpus` or `object_store_memory`.
    :param n_cpus: Number of CPUs that are needed; a local Ray is told that there are as many, whatever there is.
    :param log_level: Level of Ray's and RLlib's loggers.
    :param key: Where the arguments are configured, for messages.
    :raises ConfigError: It cannot be reached, or an argument is wrong.
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
    # a worker that fails leaves its traceback in its output only
    arguments: dict[str, Any] = {"logging_level": getattr(logging, level, logging.WARNING), "log_to_driver": True}
    if address == _LOCAL:
        arguments.update(include_dashboard=False, num_cpus=max(os.cpu_count() or 1, math.ceil(n_cpus)))
    _check_address(address, key)
    try:
        with handlers_kept():  # Ray leaves the process at SIGTERM; a training saves first
            ray.init(**{**arguments, **config, "address": address})
    except (TypeError, ValueError, RuntimeError, OSError) as error:
        raise ConfigError(_explained(error, address, config, key)) from error
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
    """Raises unless something answers at an address, as far as it says where that is."""
    if address.startswith("ray://"):
        raise ConfigError(
            f"{key}: {address} is an address of Ray Client, through which calls take 7 to 12 times as long. "
            "Start the training on a machine of the cluster (as a job: `ray job submit -- maze-run ...`) with "
            "`auto` or <host>:<port> instead."
        )
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        try:
            _connect(address)  # Ray itself would try for a minute
        except OSError as error:
            advice = "`ray start --head` says which address its cluster has, port 6379 usually."
            raise ConfigError(_unreachable(error, address, key, f"Nothing answers there: {advice}")) from error


def _watch_head(address: str, ended: threading.Event) -> None:
    """Ends the run in order where the head is gone: Ray would end this process after a minute, without a word."""
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
        "The head of the Ray cluster at %s does not answer any more. The run ends after what is under way, while "
        "its state can still be saved; input_dir=<its directory> resume=true goes on from there.",
        address,
    )
    os.kill(os.getpid(), signal.SIGTERM)


def _explained(error: Exception, address: str, config: Mapping[str, Any], key: str) -> str:
    import inspect

    known = [n for n in inspect.signature(require_ray().init).parameters if not n.startswith(("_", "kwargs"))]
    unknown = [name for name in config if name not in known and not name.startswith("_")]
    if unknown:
        hint = f"{did_you_mean(unknown[0], known)} Known: {', '.join(known)}."
        return f"{key}.{unknown[0]}: ray.init has no such argument.{hint}"
    text = " ".join(str(error).split())
    if address == _LOCAL:
        return f"{key}: Ray could not be started: {text}"
    advice = "Is the cluster running (`ray status`), and does this machine reach it?"
    if "version" in text.lower():
        advice = "All machines of a cluster need the same versions of Python, Ray and Maze."
    elif any(word in text.lower() for word in ("fail", "authent", "token")):
        advice = (
            "A cluster that was started with a token asks for it: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or "
            "the file ~/.ray/auth_token, here as well; a token may also have expired."
        )
    return _unreachable(error, address, key, advice)


def _unreachable(error: Exception, address: str, key: str, advice: str) -> str:
    return f"{key}: Ray at {address} could not be reached: {' '.join(str(error).split())}. {advice}"


def _connect(address: str) -> None:
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()


def n_cpus() -> float:
    """Number of CPUs of the cluster."""
    return float(require_ray().cluster_resources().get("CPU", 0.0))


def require_cpus(n_needed: float, what: str, advice: str) -> None:
    """Ray would wait for ever for places that its cluster does not have.

    :param n_needed: Number of CPUs that are needed.
    :param what: What needs them.
    :param advice: How to ask for fewer.
    :raises ConfigError: The cluster has fewer.
    """
    if n_needed > n_cpus():
        raise ConfigError(f"{what} need {n_needed:g} CPUs, but the Ray cluster has {n_cpus():g}. {advice}")


def require_ray() -> Any:
    """The package, which comes with an extra.

    :raises ConfigError: It is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            f"Ray is not installed ({error}); it comes with an extra: {install_command('ray')}."
        ) from error
    return ray
