"""Requests per second of `maze-serve`, beside a FastAPI endpoint that returns a constant.

Each server runs alone on one core, and what asks it on another one: 32 connections, each of which asks again as soon as
it has its answer. They take turns, so that what else the machine does meets all of them. Processor time per request is
that of the server's process; on a machine that is shared it says more than requests per second.

    python benchmarks/serve_speed.py [--seconds 3] [--rounds 3] [--connections 32] [--bundle policy.maze] [--json FILE]

Needs FastAPI for the comparison (`pip install fastapi`). Without a bundle it exports an untrained policy for CartPole
with two layers of 64 units.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

OBSERVATION = [0.01, -0.02, 0.03, -0.04]
CONSTANT = """
from fastapi import FastAPI

app = FastAPI()


@app.post("/act")
async def act() -> dict[str, int]:
    return {"action": 1}
"""
SERVER_CORE, CLIENT_CORE = 0, 1
_TICKS = os.sysconf("SC_CLK_TCK")


def make_bundle(path: Path) -> Path:
    """Exports an untrained policy for CartPole."""
    command = [sys.executable, "-c", MAKE_BUNDLE, str(path)]
    subprocess.run(command, check=True, timeout=300)
    return path


MAKE_BUNDLE = """
import sys
from maze.core.agent.torch_policy import TorchPolicy
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.distributions.distribution_mapper import DistributionMapper
from maze.perception.models.built_in.flatten_concat import FlattenConcatPolicyNet
from maze.serve.export import export_policy
from torch import nn

env = GymMazeEnv("CartPole-v1")
network = FlattenConcatPolicyNet(
    {"observation": (4,)}, {"action": (2,)}, non_lin=nn.Tanh, hidden_units=[64, 64]
)
mapper = DistributionMapper(env.action_space, {})
policy = TorchPolicy({0: network}, mapper, device="cpu")
open(sys.argv[1], "wb").write(export_policy(policy, env, {"name": "cartpole"}, n_steps=500))
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(command: list[str], port: int, **settings: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A server on its core, which answers when the block begins."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(["taskset", "-c", str(SERVER_CORE), *command], env=environment, **settings)
    try:
        for _ in range(300):
            if process.poll() is not None:
                raise SystemExit(f"{command} ended with status {process.returncode}")
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                time.sleep(0.1)
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(20)


def cpu_seconds(process: subprocess.Popen[bytes]) -> float:
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def request(path: str, body: Any) -> bytes:
    content = json.dumps(body).encode()
    lines = (f"POST {path} HTTP/1.1", "Host: a", "Content-Type: application/json", f"Content-Length: {len(content)}")
    return "\r\n".join([*lines, "", ""]).encode() + content


def answer_in(data: bytes) -> int:
    """Length of the complete answer that data begins with; 0: it is not complete."""
    end = data.find(b"\r\n\r\n")
    if end < 0:
        return 0
    place = data.lower().find(b"content-length:", 0, end)
    length = end + 4 + int(data[place + 15 : data.find(b"\r\n", place)])
    return length if len(data) >= length else 0


def ask_once(port: int, asked: bytes) -> dict[str, Any]:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(asked)
        data = b""
        while not (length := answer_in(data)):
            data += connection.recv(1 << 16)
        found: dict[str, Any] = json.loads(data[data.find(b"\r\n\r\n") + 4 : length])
        return found


def load(port: int, requests: list[bytes], seconds: float) -> list[float]:
    """Asks over one connection for each request, again and again; the seconds that each answer took."""
    poll, connections, pending = select.epoll(), {}, {}
    for asked in requests:
        connection = socket.create_connection(("127.0.0.1", port))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        poll.register(connection.fileno(), select.EPOLLIN)
        connections[connection.fileno()] = (connection, asked)
        pending[connection.fileno()] = b""
    taken: list[float] = []
    began = {}
    end = time.perf_counter() + seconds
    for number, (connection, asked) in connections.items():
        began[number] = time.perf_counter()
        connection.send(asked)
    is_open = set(connections)
    while is_open:
        for number, _ in poll.poll(1.0):
            connection, asked = connections[number]
            data = pending[number] + connection.recv(1 << 16)
            if not answer_in(data):
                pending[number] = data
                continue
            if not data.startswith(b"HTTP/1.1 200"):
                raise SystemExit(data.decode(errors="replace"))
            pending[number] = b""
            now = time.perf_counter()
            taken.append(now - began[number])
            began[number] = now
            if now < end:
                connection.send(asked)
            else:
                is_open.discard(number)
    for connection, _ in connections.values():
        connection.close()
    return taken


def measured(process: subprocess.Popen[bytes], port: int, requests: list[bytes], seconds: float) -> dict[str, float]:
    load(port, requests, min(0.5, seconds))
    own, used = time.process_time(), cpu_seconds(process)
    taken = sorted(load(port, requests, seconds))
    return {
        "per_second": len(taken) / seconds,
        "p50_ms": 1e3 * taken[len(taken) // 2],
        "p99_ms": 1e3 * taken[int(0.99 * len(taken))],
        "cpu_us": 1e6 * (cpu_seconds(process) - used) / len(taken),
        "client_busy": (time.process_time() - own) / seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--bundle", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        bundle = options.bundle or make_bundle(Path(directory) / "cartpole.maze")
        (Path(directory) / "constant.py").write_text(CONSTANT)
        os.sched_setaffinity(0, {CLIENT_CORE})
        results: dict[str, list[dict[str, float]]] = {}
        for _ in range(options.rounds):
            for name, result in one_round(bundle, Path(directory), options.connections, options.seconds).items():
                results.setdefault(name, []).append(result)
    medians = {
        name: {key: statistics.median(each[key] for each in found) for key in found[0]}
        for name, found in results.items()
    }
    constant = medians["FastAPI, a constant"]
    print(f"{options.connections} connections, median of {options.rounds} rounds of {options.seconds:g} s\n")
    print(f"{'':28}{'requests/s':>11}{'p50 ms':>9}{'p99 ms':>9}{'cpu us':>9}{'client':>8}{'ratio':>8}{'cpu ratio':>11}")
    for name, found in medians.items():
        ratio, cpu = found["per_second"] / constant["per_second"], constant["cpu_us"] / found["cpu_us"]
        print(
            f"{name:28}{found['per_second']:11.0f}{found['p50_ms']:9.2f}{found['p99_ms']:9.2f}{found['cpu_us']:9.0f}"
            f"{found['client_busy']:8.2f}{ratio:8.2f}{cpu:11.2f}"
        )
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


def one_round(bundle: Path, directory: Path, n_connections: int, seconds: float) -> dict[str, dict[str, float]]:
    results = {}
    port = free_port()
    uvicorn = [sys.executable, "-m", "uvicorn", "--loop", "uvloop", "--http", "httptools", "--no-access-log"]
    command = [*uvicorn, "--log-level", "warning", "--port", str(port), "--app-dir", str(directory), "constant:app"]
    with running(command, port) as process:
        results["FastAPI, a constant"] = measured(process, port, [request("/act", {})] * n_connections, seconds)
    port = free_port()
    log = directory / "log"
    for name, more in (("maze-serve", []), ("with a decision log", ["--decision-log", str(log)])):
        port = free_port()
        command = [sys.executable, "-m", "maze.serve.server", str(bundle), "--port", str(port), *more]
        with running(command, port, stderr=subprocess.DEVNULL) as process:
            asked = request("/act", {"observation": OBSERVATION})
            results[f"{name}: /act"] = measured(process, port, [asked] * n_connections, seconds)
            if more:
                continue
            sampled = request("/act", {"observation": OBSERVATION, "deterministic": False, "seed": 3})
            results[f"{name}: sampled"] = measured(process, port, [sampled] * n_connections, seconds)
            ranked = request("/act", {"observation": OBSERVATION, "ranked": 2})
            results[f"{name}: ranked"] = measured(process, port, [ranked] * n_connections, seconds)
            sessions = [ask_once(port, request("/sessions", {}))["session"] for _ in range(n_connections)]
            asked_in = [request(f"/sessions/{session}/act", {"observation": OBSERVATION}) for session in sessions]
            results[f"{name}: in sessions"] = measured(process, port, asked_in, seconds)
    return results


if __name__ == "__main__":
    main()
