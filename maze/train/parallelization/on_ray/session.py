"""Ray for the time of a run."""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import threading
from collections.abc import Mapping
from typing import Any

from maze.core.errors import ConfigError, did_you_mean

logger = logging.getLogger(__name__)

_ADDRESS = "RAY_ADDRESS"
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


class RaySession:
    """Context in which Ray runs: one that is there already, a cluster that is named, or a local one started for it.

    Nobody else's cluster is joined because it happens to run on this machine: it has to be named, here or in the
    environment variable RAY_ADDRESS. Only what this context has started is shut down when it is left.

    :param ray_config: Arguments of `ray.init`, such as `address`, `num_cpus` or `object_store_memory`.
    :param n_cpus: Number of CPUs that are needed; a local Ray is told that there are as many, whatever there is.
    :param log_level: Level of Ray's and RLlib's loggers.
    :param key: Where the arguments are configured, for messages.
    """

    def __init__(
        self,
        ray_config: Mapping[str, Any] | None,
        n_cpus: float,
        log_level: str = "WARN",
        key: str = "runner.ray_config",
    ) -> None:
        self._ray_config = {name: value for name, value in (ray_config or {}).items() if value is not None}
        self._n_cpus = n_cpus
        self._log_level = "WARNING" if log_level == "WARN" else log_level
        self._key = key
        self._is_ours = False
        self._ended = threading.Event()

    def __enter__(self) -> RaySession:
        ray = require_ray()
        if not ray.is_initialized():
            arguments = self._arguments()
            handlers = _signal_handlers()
            logging.getLogger("ray").setLevel(self._log_level)
            logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
            is_there = False
            try:
                is_there = self._check_address(arguments["address"])
                ray.init(**arguments)
            except (TypeError, ValueError, RuntimeError, ConnectionError, OSError) as error:
                raise ConfigError(self._explained(error, arguments["address"], is_there)) from error
            finally:
                _restore(handlers)  # Ray leaves the process at SIGTERM; a training saves first
            self._is_ours = True
            if arguments["address"] != "local":
                self._ended.clear()
                gcs = str(ray.get_runtime_context().gcs_address)
                threading.Thread(target=self._watch_head, args=(gcs,), daemon=True).start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._ended.set()
        if self._is_ours:
            self._is_ours = False
            require_ray().shutdown()

    @property
    def n_cpus(self) -> float:
        """Number of CPUs of the cluster."""
        return float(require_ray().cluster_resources().get("CPU", 0.0))

    def _arguments(self) -> dict[str, Any]:
        os.environ.update({name: value for name, value in _QUIET.items() if name not in os.environ})
        level = getattr(logging, self._log_level, logging.WARNING)
        # a worker that fails leaves its traceback in its output only
        arguments: dict[str, Any] = {"logging_level": level, "log_to_driver": True}
        address = self._ray_config.get("address") or os.environ.get(_ADDRESS) or "local"
        if address == "local":
            arguments.update(include_dashboard=False, num_cpus=max(os.cpu_count() or 1, math.ceil(self._n_cpus)))
        return {**arguments, **self._ray_config, "address": address}

    def _check_address(self, address: str) -> bool:
        """Whether something answers at an address; True as well where only Ray knows which one it is."""
        if address.startswith("ray://"):
            raise ConfigError(
                f"{self._key}: {address} is an address of Ray Client, through which calls take 7 to 12 times as long. "
                "Start the training on a machine of the cluster (as a job: `ray job submit -- maze-run ...`) with "
                "`auto` or <host>:<port> instead."
            )
        host, _, port = address.rpartition(":")
        if host and port.isdecimal():
            _connect(address)  # Ray itself would try for a minute
        return True

    def _watch_head(self, address: str) -> None:
        """Ends the run in order where the head is gone: Ray would end this process after a minute, without a word."""
        n_failures = 0
        while n_failures < _HEAD_FAILURES:
            if self._ended.wait(_HEAD_SECONDS):
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

    def _explained(self, error: Exception, address: str, is_there: bool) -> str:
        import inspect

        import ray

        known = [name for name in inspect.signature(ray.init).parameters if not name.startswith(("_", "kwargs"))]
        unknown = [name for name in self._ray_config if name not in known and not name.startswith("_")]
        if unknown:
            hint = f"{did_you_mean(unknown[0], known)} Known: {', '.join(known)}."
            return f"{self._key}.{unknown[0]}: ray.init has no such argument.{hint}"
        text = " ".join(str(error).split())
        if address == "local":
            return f"{self._key}: Ray could not be started: {text}"
        advice = "Is the cluster running (`ray status`), and does this machine reach it?"
        if not is_there:
            advice = "Nothing answers there: `ray start --head` says which address its cluster has, port 6379 usually."
        elif "version" in text.lower():
            advice = "All machines of a cluster need the same versions of Python, Ray and Maze."
        elif "fail" in text.lower() or "authent" in text.lower() or "token" in text.lower():
            advice = (
                "A cluster that was started with a token asks for it: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or "
                "the file ~/.ray/auth_token, here as well; a token may also have expired."
            )
        return f"{self._key}: Ray at {address} could not be reached: {text}. {advice}"


def _connect(address: str) -> None:
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()


def require_cpus(n_cpus: float, what: str, advice: str) -> None:
    """Ray would wait for ever for places that its cluster does not have.

    :param n_cpus: Number of CPUs that are needed.
    :param what: What needs them.
    :param advice: How to ask for fewer.
    :raises ConfigError: The cluster has fewer.
    """
    available = float(require_ray().cluster_resources().get("CPU", 0.0))
    if n_cpus > available:
        raise ConfigError(f"{what} need {n_cpus:g} CPUs, but the Ray cluster has {available:g}. {advice}")


def require_ray() -> Any:
    """The package, which comes with an extra.

    :raises ConfigError: It is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            f"Ray is not installed ({error}); it comes with an extra: pip install 'maze-rl[ray]'."
        ) from error
    return ray


def _signal_handlers() -> dict[int, Any]:
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT)}


def _restore(handlers: Mapping[int, Any]) -> None:
    for signum, handler in handlers.items():
        if handler is not None:
            signal.signal(signum, handler)
