"""Requests per second and latency of `maze-serve`: alone, relative to FastAPI, and under attacks.

Each server runs alone on one core, its clients on another one: 32 connections, each of which sends its next request as
soon as it has its answer. The peers are two FastAPI endpoints: one returns a constant, one runs the same ONNX network
through onnxruntime. Servers are measured alternately. Processor time per request is that of the server's process; on a
shared machine it is more reliable than requests per second.

    python benchmarks/serve_speed.py [--seconds 3] [--rounds 3] [--connections 32] [--bundle policy.maze] [--json FILE]

With `--attacks`, one client sends decisions one after the other while others attack the same server: endless trailers,
unread answers, batches of 1,024 observations, bodies of 1 MiB, requests without end. Each attack lasts
`--seconds`. Reported are the client's 99th percentile and the largest resident memory of the server's process; the exit
status is 1 where the percentile reaches 50 ms or the memory 200 MiB.

    python benchmarks/serve_speed.py --attacks --seconds 10

Needs FastAPI for the comparison (`pip install fastapi`). Without a bundle it exports an untrained policy for CartPole
with two layers of 64 units.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import select
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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
WITH_NETWORK = """
import json, sys, zipfile
import numpy as np
import onnxruntime
from fastapi import FastAPI
from pydantic import BaseModel

archive = zipfile.ZipFile("policy.maze")
network = json.loads(archive.read("bundle.json"))["networks"][0]
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = options.inter_op_num_threads = 1
session = onnxruntime.InferenceSession(archive.read(network["file"]), options, providers=["CPUExecutionProvider"])
(entry,), (head,) = network["inputs"].values(), network["outputs"].values()
app = FastAPI()


class Asked(BaseModel):
    observation: list[float]


@app.post("/act")
async def act(query: Asked) -> dict[str, int]:
    logits = session.run([head], {entry: np.array([query.observation], np.float32)})[0]
    return {"action": int(logits.argmax())}
"""
PEERS = {"FastAPI, a constant": CONSTANT, "FastAPI, the network": WITH_NETWORK}
MOST_MS, MOST_MIB = 50.0, 200.0
SERVER_CORE, CLIENT_CORE = 0, 1
_TICKS = os.sysconf("SC_CLK_TCK")


def make_bundle(path: Path) -> Path:
    """Export an untrained policy for CartPole."""
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


def ask_once(port: int, query: bytes) -> dict[str, Any]:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(query)
        data = b""
        while not (length := answer_in(data)):
            data += connection.recv(1 << 16)
        found: dict[str, Any] = json.loads(data[data.find(b"\r\n\r\n") + 4 : length])
        return found


def outcome_after(query: bytes, answer: bytes) -> bytes:
    """The request that follows an answer: the outcome of its decision, then the next decision."""
    if not query.startswith(b"POST /act "):
        return request("/act", {"observation": OBSERVATION})
    decision = json.loads(answer[answer.find(b"\r\n\r\n") + 4 :])["decision"]
    return request(f"/decisions/{decision}/outcome", {"reward": 1.0})


def load(
    port: int, requests: list[bytes], seconds: float, following: Callable[[bytes, bytes], bytes] | None = None
) -> list[float]:
    """Send the requests, each over one connection, again and again.

    :param following: The next request of a connection, from a request and its answer; `None`: the same.
    :return: The seconds that each answer took.
    """
    poll, connections, pending = select.epoll(), {}, {}
    for query in requests:
        connection = socket.create_connection(("127.0.0.1", port))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        poll.register(connection.fileno(), select.EPOLLIN)
        connections[connection.fileno()] = (connection, query)
        pending[connection.fileno()] = b""
    taken: list[float] = []
    began = {}
    end = time.perf_counter() + seconds
    for number, (connection, query) in connections.items():
        began[number] = time.perf_counter()
        connection.send(query)
    is_open = set(connections)
    while is_open:
        for number, _ in poll.poll(1.0):
            connection, query = connections[number]
            data = pending[number] + connection.recv(1 << 16)
            if not answer_in(data):
                pending[number] = data
                continue
            if not data.startswith(b"HTTP/1.1 20"):
                raise SystemExit(data.decode(errors="replace"))
            pending[number] = b""
            now = time.perf_counter()
            taken.append(now - began[number])
            if following is not None:
                query = following(query, data)
                connections[number] = (connection, query)
                now = time.perf_counter()
            began[number] = now
            if now < end:
                connection.send(query)
            else:
                is_open.discard(number)
    for connection, _ in connections.values():
        connection.close()
    return taken


def measured(
    process: subprocess.Popen[bytes],
    port: int,
    requests: list[bytes],
    seconds: float,
    following: Callable[[bytes, bytes], bytes] | None = None,
) -> dict[str, float]:
    load(port, requests, min(0.5, seconds), following)
    own, used = time.process_time(), cpu_seconds(process)
    taken = sorted(load(port, requests, seconds, following))
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
    parser.add_argument("--attacks", action="store_true")
    parser.add_argument("--address", default="127.0.0.2", help="the client's beside attacks, which come from 127.0.0.1")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        bundle = options.bundle or make_bundle(Path(directory) / "cartpole.maze")
        shutil.copy(bundle, Path(directory) / "policy.maze")
        for number, text in enumerate(PEERS.values()):
            (Path(directory) / f"peer_{number}.py").write_text(text)
        os.sched_setaffinity(0, {CLIENT_CORE})
        if options.attacks:
            sys.exit(attacked(bundle, options.seconds, options.json, options.address))
        results: dict[str, list[dict[str, float]]] = {}
        for _ in range(options.rounds):
            for name, result in one_round(bundle, Path(directory), options.connections, options.seconds).items():
                results.setdefault(name, []).append(result)
    medians = {
        name: {key: statistics.median(each[key] for each in found) for key in found[0]}
        for name, found in results.items()
    }
    peer = medians["FastAPI, the network"]
    print(f"{options.connections} connections, median of {options.rounds} rounds of {options.seconds:g} s\n")
    print(f"{'':36}{'requests/s':>11}{'p50 ms':>9}{'p99 ms':>9}{'cpu us':>9}{'client':>8}{'ratio':>8}{'cpu ratio':>11}")
    for name, found in medians.items():
        ratio, cpu = found["per_second"] / peer["per_second"], peer["cpu_us"] / found["cpu_us"]
        print(
            f"{name:36}{found['per_second']:11.0f}{found['p50_ms']:9.2f}{found['p99_ms']:9.2f}{found['cpu_us']:9.0f}"
            f"{found['client_busy']:8.2f}{ratio:8.2f}{cpu:11.2f}"
        )
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


def one_round(bundle: Path, directory: Path, n_connections: int, seconds: float) -> dict[str, dict[str, float]]:
    results = {}
    query = request("/act", {"observation": OBSERVATION})
    uvicorn = [sys.executable, "-m", "uvicorn", "--loop", "uvloop", "--http", "httptools", "--no-access-log"]
    for number, name in enumerate(PEERS):
        port = free_port()
        command = [*uvicorn, "--log-level", "warning", "--port", str(port), f"peer_{number}:app"]
        with running(command, port, cwd=directory) as process:
            results[name] = measured(process, port, [query] * n_connections, seconds)
    logging = ["--decision-log", str(directory / "log")]
    servers = {"maze-serve": [], "decision log": logging, "decision log, explore": [*logging, "--explore", "0.1"]}
    for name, more in servers.items():
        port = free_port()
        command = [sys.executable, "-m", "maze.serve.server", str(bundle), "--port", str(port), *more]
        with running(command, port, stderr=subprocess.DEVNULL) as process:
            results[f"{name}: /act"] = measured(process, port, [query] * n_connections, seconds)
            sampled = request("/act", {"observation": OBSERVATION, "deterministic": False, "seed": 3})
            results[f"{name}: sampled"] = measured(process, port, [sampled] * n_connections, seconds)
            if more:
                reported = measured(process, port, [query] * n_connections, seconds, outcome_after)
                results[f"{name}: /act, outcome"] = reported
                continue
            ranked = request("/act", {"observation": OBSERVATION, "ranked": 2})
            results[f"{name}: ranked"] = measured(process, port, [ranked] * n_connections, seconds)
            sessions = [ask_once(port, request("/sessions", {}))["session"] for _ in range(n_connections)]
            asked_in = [request(f"/sessions/{session}/act", {"observation": OBSERVATION}) for session in sessions]
            results[f"{name}: in sessions"] = measured(process, port, asked_in, seconds)
    return results


# -- attacks ----------------------------------------------------------------------------------------------------------


def attackers(
    n_connections: int, content: bytes, repeated: bytes = b"", reads: bool = True
) -> Callable[[int, float], None]:
    """Connections that send without end and as fast as the server takes it.

    :param n_connections: Connections at a time; closed ones are opened again.
    :param content: What a connection sends first.
    :param repeated: What it sends from then on; empty: the content again; a zero byte: nothing.
    :param reads: Whether answers are read. Without, a connection sends whatever fits.
    """

    def attack(port: int, seconds: float) -> None:
        poll, open_ones = select.epoll(), {}
        end = time.monotonic() + seconds

        def connect() -> None:
            connection = socket.create_connection(("127.0.0.1", port), timeout=30.0)
            connection.setblocking(False)
            poll.register(connection.fileno(), select.EPOLLIN * reads | select.EPOLLOUT)
            open_ones[connection.fileno()] = [connection, memoryview(content), b""]

        def drop(number: int) -> None:
            poll.unregister(number)
            open_ones.pop(number)[0].close()
            time.sleep(0.005)

        while time.monotonic() < end:
            if len(open_ones) < n_connections:
                with suppress(OSError):  # the server's queue of connections is full
                    connect()
            for number, event in poll.poll(0.01):
                connection, rest, received = state = open_ones[number]
                try:
                    if event & (select.EPOLLHUP | select.EPOLLERR):
                        raise ConnectionResetError
                    if event & select.EPOLLIN:
                        data = connection.recv(1 << 16)
                        if not data:
                            raise ConnectionResetError
                        received += data
                        while length := answer_in(received):
                            received = received[length:]
                            rest = rest or memoryview(repeated or content)
                        state[2] = received
                    if event & select.EPOLLOUT and rest:
                        rest = rest[connection.send(rest) :]
                    if not rest and (repeated or not reads) and repeated != b"\0":
                        rest = memoryview(repeated or content)
                    state[1] = rest
                    waits = select.EPOLLOUT if rest else 0
                    poll.modify(number, select.EPOLLIN * reads | waits)
                except BlockingIOError:
                    pass
                except OSError:
                    drop(number)
        for number in list(open_ones):
            open_ones[number][0].close()

    return attack


_CHUNKED = b"POST /nothing HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n"
_TRAILERS = b"".join(b"X-%06d: %s\r\n" % (number, b"y" * 1000) for number in range(60))
_BATCH = request("/act", {"observations": [OBSERVATION] * 1024})
_LARGE = request("/act", {"observations": [[0] * 500_000]})
ATTACKS: dict[str, Callable[[int, float], None]] = {
    "none": lambda port, seconds: time.sleep(seconds),
    "1 sends endless trailers": attackers(1, _CHUNKED, _TRAILERS),
    "20 send endless trailers": attackers(20, _CHUNKED, _TRAILERS),
    "20 send endless chunk extensions": attackers(20, _CHUNKED[:-3] + b"1;x=", b"y" * 60_000),
    "300 send ahead, read nothing": attackers(300, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" * 100, reads=False),
    "300 read no pages": attackers(300, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" * 10, b"\0", reads=False),
    "300 read no decisions": attackers(300, request("/act", {"observation": OBSERVATION}) * 10, b"\0", reads=False),
    "300 read no batches": attackers(300, _BATCH * 4, b"\0", reads=False),
    "8 send batches": attackers(8, _BATCH),
    "32 send batches": attackers(32, _BATCH),
    "32 send ranked batches": attackers(
        32, request("/act", {"observations": [OBSERVATION] * 512, "ranked": 2, "deterministic": False, "seed": 1})
    ),
    "100 send bodies of 1 MiB": attackers(100, _LARGE),
    "100 send bodies of 60 KiB": attackers(100, request("/act", {"observation": [0] * 30_000})),
    "200 send single requests": attackers(200, request("/act", {"observation": OBSERVATION})),
    "20 read /metrics": attackers(20, b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n"),
}


def beside(port: int, attack: Callable[[int, float], None], seconds: float, address: str = "127.0.0.2") -> list[float]:
    """The seconds that each answer took which one client got while an attack went on, from its beginning.

    :param port: The server's.
    :param attack: The attack; it runs in a process of its own, from 127.0.0.1.
    :param seconds: How long.
    :param address: The client's.
    """
    process = multiprocessing.Process(target=attack, args=(port, seconds))
    process.start()
    taken: list[float] = []
    query = request("/act", {"observation": OBSERVATION})
    with socket.create_connection(("127.0.0.1", port), timeout=60.0, source_address=(address, 0)) as connection:
        while process.is_alive():
            began, data = time.perf_counter(), b""
            connection.sendall(query)
            while not answer_in(data):
                data += connection.recv(1 << 16)
            # a refusal counts as an answer that never came
            taken.append(time.perf_counter() - began if data.startswith(b"HTTP/1.1 200") else float("inf"))
            time.sleep(0.002)  # leaves the core to the attack
    process.join()
    return taken


def attacked(bundle: Path, seconds: float, file: Path | None, address: str) -> bool:
    """Measure each attack on a server of its own; whether a limit was reached."""
    print(f"one client beside attacks of {seconds:g} s each, on one core\n")
    print(f"{'':34}{'decisions':>10}{'p50 ms':>9}{'p99 ms':>9}{'max ms':>9}{'MiB':>6}")
    results = {}
    for name, attack in ATTACKS.items():
        port = free_port()
        command = [sys.executable, "-m", "maze.serve.server", str(bundle), "--port", str(port)]
        with running(command, port, stderr=subprocess.DEVNULL) as process:
            taken = sorted(beside(port, attack, seconds, address))
            status = Path(f"/proc/{process.pid}/status").read_text()
        memory = int(status.split("VmHWM:")[1].split()[0]) / 1024
        p50, p99, most = (1e3 * taken[int(share * (len(taken) - 1))] for share in (0.5, 0.99, 1.0))
        results[name] = {"n": len(taken), "p50_ms": p50, "p99_ms": p99, "max_ms": most, "mib": memory}
        print(f"{name:34}{len(taken):10}{p50:9.2f}{p99:9.2f}{most:9.1f}{memory:6.0f}", flush=True)
    if file:
        file.write_text(json.dumps(results, indent=1))
    return any(each["p99_ms"] >= MOST_MS or each["mib"] >= MOST_MIB for each in results.values())


if __name__ == "__main__":
    main()
