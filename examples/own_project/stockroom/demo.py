"""`make demo`: train, compare, gate, export and serve a policy."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from datetime import datetime
from importlib import resources
from pathlib import Path

import yaml

from maze.maze_cli import main as maze_run
from maze.serve.client import PolicyClient

from .env import StockroomEnv

SEEDS = ("seeding.env_base_seed=1", "seeding.agent_base_seed=2")
EPISODES = ("env=stockroom", "runner.n_episodes=100", *SEEDS)


def main() -> int:
    """Print and run the commands; return the exit status of the first failure, or 0."""
    base = Path("outputs") / "demo" / datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    trained, bundle = f"{base}/training", f"{base}/policy.maze"
    commands = (
        ("-cn", "conf_train", "+experiment=stockroom_ppo", *SEEDS, f"hydra.run.dir={trained}"),
        (
            "-cn",
            "conf_compare",
            f"policies=[stockroom_rule,random,{{trained: {trained}}}]",
            *EPISODES,
            f"hydra.run.dir={base}/compared",
        ),
        (
            *("-cn", "conf_gate", f"candidate={trained}", "baseline=stockroom_rule", "env=stockroom", *SEEDS),
            *("runner.maximize=[profit_per_day]", f"hydra.run.dir={base}/gate"),
        ),
        ("--export", trained, "--out", bundle, "--trust", "stockroom"),
    )
    for command in commands:
        print("\n$ maze-run", *command, flush=True)
        if status := maze_run(command):
            return status
    serve = (bundle, "--port", "0", "--on-drift", "fallback", "--fallback", "stockroom.heuristic:MostUrgentFirst")
    print("\n$ maze-serve", *serve, flush=True)
    serve_a_week(serve)
    pages = (f"{trained}/report.html", f"{base}/compared/report.html", f"{base}/gate/gate.md")
    print("\nLook at", *pages, sep="\n  ")
    print(f"Watch the policy: maze-run --play {trained} --trust stockroom")
    return 0


def serve_a_week(arguments: tuple[str, ...]) -> None:
    """Start the server, request the decisions of a week, and print them."""
    config = yaml.safe_load((resources.files("stockroom.conf") / "env" / "stockroom.yaml").read_text())
    env = StockroomEnv(**{name: value for name, value in config.items() if name != "_target_"})
    env.seed(1)
    observation = env.reset()
    command = [sys.executable, "-m", "maze.serve.server", *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as service:
        assert service.stderr is not None
        try:
            said = (json.loads(line)["message"] for line in service.stderr)
            url = next(found[0] for message in said if (found := re.search(r"http://\S+:\d+", message)))
            with PolicyClient(url) as client:
                for day in range(7):
                    decided = {}
                    for step_key in env.agent_counts_dict:  # a decision for each sub-step
                        answer = client.act(observation, step_key=step_key)
                        decided.update(answer.action)
                        observation, _, _, _ = env.step(answer.action)
                    lots, product = decided["lots"], decided["product"]
                    print(f"{url}, day {day + 1}: {answer.policy} says {lots} lots of product {product}")
        finally:
            service.terminate()


if __name__ == "__main__":
    sys.exit(main())
