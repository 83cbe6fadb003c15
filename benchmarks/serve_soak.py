"""Soak test of `maze-serve`: lost requests, wrong answers and memory under failures.

Four policies that each prefer another action and say so in a way of their own take turns under one name: the action
tells which bundle has decided, and each answer names its bundle. Meanwhile 100 sessions come and go, clients hang up in
the middle of a request or before the answer, and others send what is not a request at all.

    python benchmarks/serve_soak.py [--minutes 10] [--sessions 100] [--swap-seconds 30]

Exit status 1 where a request was lost, an answer was not that of the bundle it names or, after a swap, that of the
bundle before, or memory grew.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import httpx

from maze.serve.client import ClientSession, PolicyClient

OBSERVATION = [0.01, -0.02, 0.03, 0.04]
MAKE_BUNDLES = """
import sys
import torch
from torch import nn
from maze.core.agent.torch_policy import TorchPolicy
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.distributions.distribution_mapper import DistributionMapper
from maze.serve.export import export_policy

class Always(nn.Module):
    def __init__(self, action, strength):
        super().__init__()
        self.logits = nn.Parameter(torch.eye(2)[action] * strength)
    def forward(self, observation):
        return {"action": observation["observation"][:, :1] * 0.0 + self.logits}

env = GymMazeEnv("CartPole-v1")
for number, path in enumerate(sys.argv[1:]):
    network = Always(number % 2, 3.0 + number)
    policy = TorchPolicy({0: network}, DistributionMapper(env.action_space, {}), device="cpu")
    open(path, "wb").write(export_policy(policy, env, {"name": f"always {number % 2}"}, n_steps=100))
"""
ADMIN = "administrator"
MOST_GROWTH_MIB = 16.0


class Soak:
    """State and results of the test.

    :param url: The server.
    :param bundles: Files of the policies that take turns; the first is at work.
    :param actions: What each of their bundles does, by its sum.
    :param sessions: Number of sessions at a time.
    """

    def __init__(self, url: str, bundles: list[Path], actions: dict[str, int], sessions: int) -> None:
        self.url, self.bundles, self.actions, self.n_sessions = url, bundles, actions, sessions
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self.is_over = threading.Event()
        self._turn = (0, "")

    def run(self, seconds: float, swap_seconds: float) -> None:
        """Let everybody work for a time."""
        self.swap(0)
        work = [self.ask_in_sessions] * 4 + [self.ask_alone] * 2 + [self.hang_up, self.send_nonsense]
        threads = [threading.Thread(target=self._guarded, args=(each, seed)) for seed, each in enumerate(work)]
        for thread in threads:
            thread.start()
        end = time.monotonic() + seconds
        number = 1
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(swap_seconds, left))
            self.swap(number % len(self.bundles))
            number += 1
        self.is_over.set()
        for thread in threads:
            thread.join(60)
            if thread.is_alive():
                self.problems.append("a client waits for ever")

    def _guarded(self, work: Callable[[random.Random], None], seed: int) -> None:
        rng = random.Random(seed)
        try:
            while not self.is_over.is_set():
                work(rng)
        except Exception as error:
            self.problems.append(f"{work.__name__}: {type(error).__name__}: {error}")

    def swap(self, number: int) -> None:
        """Put the next bundle to work; from its answer on, no request may be answered by another one."""
        self._turn = (self._turn[0] + 1, "")
        with PolicyClient(self.url, ADMIN, timeout=30.0) as client:
            found = client.swap("policy", self.bundles[number])
        self._turn = (self._turn[0] + 1, found["bundle"])
        self.counts["swaps"] += 1

    def check(self, action: int, bundle: str, expected: str, what: str) -> None:
        """An answer is that of the bundle it names, and that is the one expected (if any)."""
        self.counts[what] += 1
        if self.actions.get(bundle) != action:
            self.problems.append(f"{what}: {action} is not what {bundle[:8]} does")
        if expected and bundle != expected:
            self.problems.append(f"{what}: {bundle[:8]} has answered, not {expected[:8]}")

    def ask_alone(self, rng: random.Random) -> None:
        with PolicyClient(self.url, timeout=30.0, n_retries=0) as client:
            for _ in range(200):
                turn, at_work = self._turn
                answer = client.act(OBSERVATION)
                # While a swap is going on (odd turns), the one before and the one after are both right.
                is_settled = turn % 2 == 0 and self._turn[0] == turn
                self.check(answer.action, answer.bundle, at_work if is_settled else "", "alone")
                answers = client.act_many([OBSERVATION] * 5)
                for each in answers:
                    self.check(each.action, each.bundle, answers[0].bundle, "together")

    def ask_in_sessions(self, rng: random.Random) -> None:
        with PolicyClient(self.url, timeout=30.0) as client:
            sessions = [client.session() for _ in range(self.n_sessions // 4)]
            for _ in range(40):
                for index, session in enumerate(sessions):
                    self.check_in(session)
                    if rng.random() < 0.05:
                        if rng.random() < 0.5:
                            session.close()
                        sessions[index] = client.session()
                if self.is_over.is_set():
                    break
            for session in sessions:
                session.close()

    def check_in(self, session: ClientSession) -> None:
        """A session is decided by the bundle that it began with."""
        answer = session.act(OBSERVATION)
        self.check(answer.action, answer.bundle, session.bundle, "in sessions")

    def hang_up(self, rng: random.Random) -> None:
        """Leave in the middle of the head, in the middle of the body, or before the answer."""
        body = json.dumps({"observation": OBSERVATION}).encode()
        head = b"POST /act HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(
            body
        )
        whole = head + body
        port = int(self.url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
            connection.sendall(whole[: rng.choice([10, len(head), len(head) + 5, len(whole)])])
            if rng.random() < 0.5:  # the connection is reset instead of closed
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        self.counts["hung up"] += 1
        time.sleep(0.002)

    def send_nonsense(self, rng: random.Random) -> None:
        """Send invalid requests and check their error codes."""
        kinds = [
            (b"{", 400),
            (b'{"observation":[NaN,0,0,0]}', 400),
            (b'{"observation":' + b"[" * 3000 + b"]" * 3000 + b"}", 400),
            (b'{"observation":[0,0,0]}', 422),
            (b'{"observation":[' + b"0," * 100_000 + b"0]}", 422),
            (b'{"observation":[' + b"0," * 1_000_000 + b"0]}", 413),
            (os.urandom(1000), 400),
        ]
        body, status = rng.choice(kinds)
        try:
            found = httpx.post(
                f"{self.url}/act", content=body, headers={"content-type": "application/json"}, timeout=30.0
            ).status_code
        except (httpx.WriteError, httpx.ReadError, httpx.RemoteProtocolError):
            found = 413  # it has hung up in the middle of what is too long
        self.counts["nonsense"] += 1
        if found != status:
            self.problems.append(f"nonsense: {body[:30]!r} got {found}, not {status}")
        time.sleep(0.02)


def memory_mib(pid: int) -> float:
    """Resident memory of a process."""
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found
    return int(found[1]) / 1024


def soak(directory: Path, seconds: float, n_sessions: int, swap_seconds: float) -> tuple[Soak, list[float]]:
    """Run it all against a server of its own.

    :param directory: Where bundles and the decision log go.
    :param seconds: How long.
    :param n_sessions: Sessions at a time.
    :param swap_seconds: Time between two swaps.
    :return: What has become of it, and the server's memory in MiB over time.
    """
    bundles = [directory / f"{number}.maze" for number in range(4)]
    subprocess.run([sys.executable, "-c", MAKE_BUNDLES, *map(str, bundles)], check=True, timeout=300)
    first = directory / "policy.maze"
    first.write_bytes(bundles[0].read_bytes())
    command = [sys.executable, "-m", "maze.serve.server", str(first), "--port", "0", "--session-seconds", "20"]
    command += ["--decision-log", str(directory / "log"), "--log-file-size", "8", "--log-files", "4"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MAZE_SERVE_ADMIN_TOKEN": ADMIN}
    with (directory / "stderr").open("w+b") as output:
        server = subprocess.Popen(command, stderr=output, env=environment)
        try:
            url = _address(server, directory / "stderr")
            work = Soak(url, bundles, _actions(bundles), n_sessions)
            memory: list[float] = []

            def watch() -> None:
                while not work.is_over.wait(max(0.2, seconds / 60)):
                    memory.append(memory_mib(server.pid))

            watching = threading.Thread(target=watch)
            watching.start()
            work.run(seconds, swap_seconds)
            watching.join()
            with PolicyClient(url) as client:
                client.act(OBSERVATION)  # it is still there
            server.terminate()
            server.wait(30)
        finally:
            if server.poll() is None:
                server.kill()
                server.wait()
    for line in (directory / "stderr").read_text().splitlines():
        if json.loads(line)["level"] in {"error", "critical"}:
            work.problems.append(f"the server's log: {line[:300]}")
    return work, memory


def _address(server: subprocess.Popen[bytes], log: Path) -> str:
    for _ in range(600):
        if found := re.search(r"http://127\.0\.0\.1:\d+", log.read_text()):
            return found[0]
        if server.poll() is not None:
            break
        time.sleep(0.05)
    raise SystemExit(f"The server did not start: {log.read_text()}")


def _actions(bundles: list[Path]) -> dict[str, int]:
    from maze.serve.bundle import PolicyBundle

    loaded = [PolicyBundle.load(path) for path in bundles]
    return {bundle.sha256: bundle.session().act(OBSERVATION) for bundle in loaded}


def growth(memory: list[float]) -> float:
    """MiB by which the last third is above the second one; the first fills caches and allocators."""
    third = len(memory) // 3
    if not third:
        return 0.0
    return max(memory[-third:]) - max(memory[third : 2 * third])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--sessions", type=int, default=100)
    parser.add_argument("--swap-seconds", type=float, default=30.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        work, memory = soak(Path(directory), options.minutes * 60, options.sessions, options.swap_seconds)
    for what, count in work.counts.items():
        print(f"{what:14}{count:9}")
    print("memory in MiB  " + " ".join(f"{each:.0f}" for each in memory[:: max(1, len(memory) // 12)]))
    print(f"growth        {growth(memory):9.1f}")
    print(f"problems      {len(work.problems):9}")
    for problem, count in Counter(work.problems).most_common(20):
        print(f"  {count} x {problem}")
    sys.exit(bool(work.problems) or growth(memory) > MOST_GROWTH_MIB)


if __name__ == "__main__":
    main()
