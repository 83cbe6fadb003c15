"""Whoever writes a simulator starts fast."""

import subprocess
import sys

HEAVY = ("torch", "matplotlib", "pandas", "hydra", "omegaconf", "tensorboard", "scipy", "ipywidgets")
MODULES = (
    "maze.core.env.maze_env",
    "maze.core.env.base_env_events",
    "maze.core.env.reward",
    "maze.core.wrappers.maze_gym_env_wrapper",
    "maze.core.wrappers.wrapper_factory",
    "maze.core.wrappers.time_limit_wrapper",
    "maze.core.rendering.renderer",
    "maze.core.utils.config_utils",
    "maze.core.utils.seeding",
    "maze.core.utils.files",
)


def output_of(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_environment_modules_import_nothing_heavy():
    code = f"import sys, {', '.join(MODULES)}; print([m for m in {HEAVY} if m in sys.modules])"
    assert output_of(code).strip() == "[]"


def test_importing_the_environment_package_takes_little_more_than_gymnasium_itself():
    code = (
        "import time\n"
        "start = time.perf_counter(); import gymnasium; middle = time.perf_counter()\n"
        "import maze.core.env.maze_env; print((time.perf_counter() - middle) / (middle - start))"
    )
    assert min(float(output_of(code)) for _ in range(3)) < 1.0
