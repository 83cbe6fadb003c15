"""Ray for the time of a training."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Mapping
from typing import Any

from maze.core.errors import ConfigError, did_you_mean

_ADDRESS = "RAY_ADDRESS"
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",  # nothing is reported to anybody
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
}
_TALKATIVE = (
    "ray._common.deprecation",
    "ray.rllib.algorithms.algorithm_config",
    "ray._private.authentication.authentication_token_setup",
    "ray.rllib.utils.deprecation",
    "ray.tune.utils.util",
    "ray.rllib.algorithms.sac.sac",
)
"""Loggers that warn about RLlib's own stages of development, and nothing that a user could change."""


class RaySession:
    """Context in which Ray runs: one that is there already, a cluster that is named, or a local one started for it.

    Only what this context has started is shut down when it is left.

    :param ray_config: Arguments of `ray.init`, such as `address`, `num_cpus` or `object_store_memory`.
    :param n_workers: Number of worker processes that have to find a place.
    :param log_level: Level of Ray's and RLlib's loggers.
    """

    def __init__(self, ray_config: Mapping[str, Any] | None, n_workers: int, log_level: str = "WARN") -> None:
        self._ray_config = dict(ray_config or {})
        self._n_workers = n_workers
        self._log_level = "WARNING" if log_level == "WARN" else log_level
        self._is_ours = False

    def __enter__(self) -> RaySession:
        import ray

        if not ray.is_initialized():
            arguments = self._arguments()
            handlers = _signal_handlers()
            try:
                ray.init(**arguments)
            except (TypeError, ValueError, RuntimeError, ConnectionError, OSError) as error:
                raise ConfigError(_explained(error, self._ray_config)) from error
            finally:
                _restore(handlers)  # Ray leaves the process at SIGTERM; a training saves first
            self._is_ours = True
        try:
            self._check_cpus()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        import ray

        if self._is_ours:
            self._is_ours = False
            ray.shutdown()

    def _arguments(self) -> dict[str, Any]:
        os.environ.update({name: value for name, value in _QUIET.items() if name not in os.environ})
        level = getattr(logging, self._log_level, logging.WARNING)
        # a worker that fails leaves its traceback in its output only
        arguments: dict[str, Any] = {"logging_level": level, "log_to_driver": True}
        is_local = not self._ray_config.get("address") and not os.environ.get(_ADDRESS)
        if is_local or self._ray_config.get("address") == "local":
            n_cpus = max(os.cpu_count() or 1, self._n_workers + 1)
            arguments.update(include_dashboard=False, num_cpus=n_cpus)
        return {**arguments, **{key: value for key, value in self._ray_config.items() if value is not None}}

    def _check_cpus(self) -> None:
        """Ray would wait for ever for places that its cluster does not have."""
        import ray

        available = ray.cluster_resources().get("CPU", 0.0)
        if self._n_workers > available:
            raise ConfigError(
                f"runner.num_workers: {self._n_workers} workers need as many CPUs, but the Ray cluster has "
                f"{available:.0f}. Reduce runner.num_workers, or let Ray use more: runner.ray_config.num_cpus."
            )


def set_log_levels(log_level: str) -> None:
    """Sets the levels of Ray's and RLlib's loggers in this process.

    :param log_level: DEBUG, INFO, WARN or ERROR.
    """
    logging.getLogger("ray").setLevel("WARNING" if log_level == "WARN" else log_level)
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.ERROR if log_level in ("WARN", "ERROR") else logging.NOTSET)


def _signal_handlers() -> dict[int, Any]:
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT)}


def _restore(handlers: Mapping[int, Any]) -> None:
    for signum, handler in handlers.items():
        if handler is not None:
            signal.signal(signum, handler)


def _explained(error: Exception, ray_config: Mapping[str, Any]) -> str:
    import inspect

    import ray

    known = [name for name in inspect.signature(ray.init).parameters if not name.startswith(("_", "kwargs"))]
    unknown = [name for name in ray_config if name not in known and not name.startswith("_")]
    if unknown:
        return (
            f"runner.ray_config.{unknown[0]}: ray.init has no such argument.{did_you_mean(unknown[0], known)} "
            f"Known: {', '.join(known)}."
        )
    return f"runner.ray_config: Ray could not be started or reached with {dict(ray_config)}: {error}"
