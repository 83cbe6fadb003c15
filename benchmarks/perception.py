"""Forward time of a policy built from perception blocks, relative to the same layers in a plain ``nn.Sequential``.

Run ``python benchmarks/perception.py [--quick] [--json PATH]``. The variants take turns, so that what else the machine
does hits all of them; figures are medians, and ratios compare within one run. Target: at most 1.5 for ``blocks``.

``python benchmarks/perception.py --candidates`` measures forward and backward passes of policy and critic that choose
among candidates, of which 10 to 30 exist where there is room for 151 (a minibatch of bin packing), beside the same with
room for 30, and with all rows computed.

``python benchmarks/perception.py --images`` measures forward and backward passes of networks for 256 images of bytes,
as `model=auto` builds them, beside the same layers in a plain ``nn.Sequential``.

``python benchmarks/perception.py --products`` measures forward and backward passes of networks of two hidden layers,
beside torch alone.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from gymnasium import spaces
from torch import nn

from maze.perception.blocks import DenseBlock, ImageDenseBlock, InferenceBlock, LinearOutputBlock, inference
from maze.perception.models.auto_model_composer import AutoModelComposer, _image_params
from maze.perception.program.network_program import in_numpy
from maze.perception.weight_init import activation_type

Gradient = Callable[[], None]
Ratios = dict[str, dict[str, float]]
"""Times in units of the first way's, by what was measured and by way."""
OBSERVATION_SIZE, HIDDEN_UNITS, N_LOGITS, BATCH_SIZE = 8, [64, 64], 4, 8


def build_blocks() -> InferenceBlock:
    """A 64x64 policy network as composers build it."""
    latent = DenseBlock("observation", "latent", (OBSERVATION_SIZE,), HIDDEN_UNITS, nn.Tanh)
    action = LinearOutputBlock("latent", "action", latent.out_shapes(), N_LOGITS)
    return InferenceBlock("observation", "action", (OBSERVATION_SIZE,), {"latent": latent, "action": action})


def build_sequential() -> nn.Sequential:
    """The same layers."""
    return nn.Sequential(
        nn.Linear(OBSERVATION_SIZE, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, N_LOGITS)
    )


def variants() -> dict[str, Callable[[], object]]:
    """One forward pass each, without gradients."""
    blocks, sequential = build_blocks(), build_sequential()
    program = in_numpy(blocks)
    assert program is not None
    array = np.random.default_rng(0).standard_normal((BATCH_SIZE, OBSERVATION_SIZE), dtype=np.float32)
    tensor = torch.from_numpy(array)
    rollout = tensor.expand(4, BATCH_SIZE, OBSERVATION_SIZE)
    return {
        "sequential": lambda: sequential(tensor),
        "blocks": lambda: blocks({"observation": tensor}),
        "sequential, two batch dimensions": lambda: sequential(rollout),
        "blocks, two batch dimensions": lambda: blocks({"observation": rollout}),
        "blocks in NumPy": lambda: program({"observation": array}),
    }


def candidates(n: int) -> tuple[dict[str, torch.Tensor], Callable[[dict[str, torch.Tensor]], None]]:
    """Set of 10 to 30 rows of 11 features with room for `n`, and a gradient of policy and critic for such sets."""
    n_sets = 3200
    seen = {
        "bin_candidates": spaces.Box(-np.inf, np.inf, (n, 11), np.float32),
        "bin_candidates_mask": spaces.Box(0.0, 1.0, (n,), np.float32),
        "bin_mask": spaces.Box(0.0, 1.0, (n,), np.float32),
    }
    composers = "maze.perception.models"
    model = AutoModelComposer(
        {0: spaces.Dict(bin=spaces.Discrete(n))},
        {0: spaces.Dict(seen)},
        {0: 1},
        policy={"_target_": f"{composers}.policies.ProbabilisticPolicyComposer"},
        critic={"_target_": f"{composers}.critics.StateCriticComposer"},
        hidden_units=[32, 32],
        attention=False,  # which sets of 151 do not have
    )
    assert model.policy is not None
    assert model.critic is not None
    policy, critic = model.policy.networks[0], next(iter(model.critic.networks.values()))
    rng = np.random.default_rng(0)
    exists = torch.zeros(n_sets, n)
    for row, size in enumerate(rng.integers(10, 31, n_sets)):
        exists[row, rng.permutation(n)[:size]] = 1.0
    batch = {"bin_candidates": torch.randn(n_sets, n, 11), "bin_candidates_mask": exists, "bin_mask": exists}

    def gradient(inputs: dict[str, torch.Tensor]) -> None:
        logits, value = policy(inputs)["bin"], critic(inputs)["value"]
        (torch.log_softmax(logits, dim=-1).amax(-1).mean() + value.mean()).backward()

    return batch, gradient


def measure_candidates(n_rounds: int) -> Ratios:
    """Print how long they take beside one another."""
    (roomy, of_roomy), (tight, of_tight) = candidates(151), candidates(30)
    many = inference._MANY_ROWS

    def all_rows() -> None:
        inference._MANY_ROWS = 10**9
        of_roomy(roomy)
        inference._MANY_ROWS = many

    ways = {
        "room for 30": lambda: of_tight(tight),
        "room for 151": lambda: of_roomy(roomy),
        "room for 151, all rows computed": all_rows,
    }
    return {"candidates": take_turns(ways, n_rounds)}


def measure_images(n_rounds: int) -> Ratios:
    """Print how long gradients of networks for images take beside the same layers as one writes them down."""
    ratios: Ratios = {}
    for channels, size in ((4, 84), (3, 96), (3, 32), (5, 10)):
        space = spaces.Box(0, 255, (channels, size, size), np.uint8)
        block = ImageDenseBlock("image", "latent", [space.shape], **_image_params(space, space.shape, "CHW"))
        layers = [m for m in copy.deepcopy(block).modules() if isinstance(m, nn.Conv2d | nn.ReLU | nn.Linear)]
        n_convolutions = sum(isinstance(layer, nn.Conv2d) for layer in layers)
        plain = nn.Sequential(*layers[: 2 * n_convolutions], nn.Flatten(), *layers[2 * n_convolutions :])
        images = torch.randint(0, 256, (256, *space.shape), dtype=torch.uint8)

        def of_blocks(block: nn.Module = block, images: torch.Tensor = images) -> None:
            block({"image": images})["latent"].square().mean().backward()

        def of_plain(plain: nn.Module = plain, images: torch.Tensor = images, scale: float = block.scale) -> None:
            plain(images.float() * scale).square().mean().backward()

        print(name := f"{channels} x {size} x {size}")
        ratios[name] = take_turns({"nn.Sequential": of_plain, "blocks": of_blocks}, n_rounds)
    return ratios


def gradient_of_layers(activation: type[nn.Module], n_rows: int, width: int) -> tuple[nn.Module, Gradient]:
    """A network of two hidden layers, and its gradient for some rows, several times if they are few."""
    network = nn.Sequential(
        *(nn.Linear(20, width), activation(), nn.Linear(width, width), activation(), nn.Linear(width, 4))
    )
    rows, times = torch.randn(n_rows, 20), max(1, 2**24 // (n_rows * width * width))

    def gradient() -> None:
        for _ in range(times):
            network(rows).square().mean().backward()

    return network, gradient


def measure_products(n_rounds: int) -> Ratios:
    """Print how long gradients take as trainers compute them."""
    ratios: Ratios = {}
    sizes = ((64, 64), (256, 64), (1024, 64), (64, 256), (256, 128), (256, 256), (2048, 64), (2048, 256))
    for activation, (n_rows, width) in itertools.product((nn.ReLU, nn.Tanh), sizes):
        _, of_torch = gradient_of_layers(activation, n_rows, width)
        _, of_trainers = gradient_of_layers(activation_type(activation, ""), n_rows, width)
        print(name := f"{n_rows} rows, {width} units, {activation.__name__}")
        ratios[name] = take_turns({"torch": of_torch, "trainers": of_trainers}, n_rounds)
    return ratios


def take_turns(functions: dict[str, Callable[[], None]], n_rounds: int) -> dict[str, float]:
    """Print CPU times, and the median of their ratios to the first.

    :return: The latter.
    """
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(n_rounds + 1):  # the first is not counted
        for name, function in functions.items():
            start = time.process_time()
            function()
            times[name].append(time.process_time() - start)
    first = next(iter(times.values()))
    ratios = {
        name: statistics.median(own / one for own, one in zip(values[1:], first[1:], strict=True))
        for name, values in times.items()
    }
    for name, values in times.items():
        print(f"{name:34s} {statistics.median(values[1:]) * 1e3:8.1f} ms   ratio {ratios[name]:.2f}")
    return ratios


def measure(functions: dict[str, Callable[[], object]], n_rounds: int, n_calls: int) -> dict[str, list[float]]:
    """Time of one call in microseconds, for each round."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    with torch.inference_mode():
        for function in functions.values():
            for _ in range(n_calls):
                function()
        for _ in range(n_rounds):
            for name, function in functions.items():
                start = time.perf_counter()
                for _ in range(n_calls):
                    function()
                times[name].append((time.perf_counter() - start) / n_calls * 1e6)
    return times


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--candidates", action="store_true", help="policies that choose among candidates")
    parser.add_argument("--images", action="store_true", help="networks for images")
    parser.add_argument("--products", action="store_true", help="products of matrices")
    parser.add_argument("--json", type=Path, help="file for the results")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    for is_asked, measure_those in (
        (arguments.candidates, measure_candidates),
        (arguments.images, measure_images),
        (arguments.products, measure_products),
    ):
        if is_asked:
            found = measure_those(n_rounds=10 if arguments.quick else 40)
            if arguments.json:
                arguments.json.write_text(json.dumps(found, indent=2))
            return
    times = measure(variants(), n_rounds=200 if arguments.quick else 2000, n_calls=10)
    microseconds = {name: statistics.median(values) for name, values in times.items()}
    references = {
        "blocks": "sequential",
        "blocks, two batch dimensions": "sequential, two batch dimensions",
        "blocks in NumPy": "sequential",
    }
    # Each round is compared with itself before the median: its variants ran within a few milliseconds.
    ratios = {
        name: statistics.median(own / other for own, other in zip(times[name], times[reference], strict=True))
        for name, reference in references.items()
    }
    for name, value in microseconds.items():
        ratio = f"   ratio {ratios[name]:.2f}" if name in ratios else ""
        print(f"{name:34s} {value:8.1f} us{ratio}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"microseconds": microseconds, "ratios": ratios}, indent=2))


if __name__ == "__main__":
    main()
