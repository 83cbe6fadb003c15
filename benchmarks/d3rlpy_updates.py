"""Record one update of IQL and of DiscreteCQL by d3rlpy, which the tests of offline training compare with ours.

    <interpreter of an environment with d3rlpy> benchmarks/d3rlpy_updates.py <file.npz>

d3rlpy 2.8 pins gymnasium 1.0 and needs an environment of its own. The tests read
`tests/train/trainers/offline/d3rlpy_updates.npz`. The file holds the batch, and the weights of all
networks before and after the update (`<algorithm>/before/<network>.<weight>`), with target networks that differ from
the learned ones.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import d3rlpy  # type: ignore[import-not-found]
import numpy as np
import torch

UNITS, BATCH, N_OBSERVATIONS = [8, 8], 12, 3


def configurations() -> dict[str, Any]:
    """The algorithms; learning rates are large, so that differences of gradients show."""
    encoder = d3rlpy.models.VectorEncoderFactory(UNITS)
    encoders = {f"{name}_encoder_factory": encoder for name in ("actor", "critic", "value")}
    rates = {"actor_learning_rate": 0.01, "critic_learning_rate": 0.01}
    return {
        "iql": d3rlpy.algos.IQLConfig(gamma=0.9, tau=0.1, expectile=0.7, weight_temp=3.0, **rates, **encoders),
        "cql": d3rlpy.algos.DiscreteCQLConfig(gamma=0.9, alpha=0.5, learning_rate=0.01, encoder_factory=encoder),
    }


def batch_of(algorithm: str, rng: np.random.Generator) -> Any:
    """Random transitions, some of which end an episode."""
    seen, following = rng.normal(size=(2, BATCH, N_OBSERVATIONS)).astype(np.float32)
    taken = rng.uniform(-0.95, 0.95, (BATCH, 1)) if algorithm == "iql" else rng.integers(2, size=(BATCH, 1))
    return d3rlpy.dataset.TransitionMiniBatch(
        observations=seen,
        actions=taken.astype(np.float32),
        rewards=rng.normal(size=(BATCH, 1)).astype(np.float32),
        next_observations=following,
        next_actions=taken.astype(np.float32),
        terminals=(np.arange(BATCH)[:, None] % 4 == 0).astype(np.float32),
        intervals=np.ones((BATCH, 1), np.float32),
        transitions=[],
    )


def weights_of(impl: Any) -> dict[str, Any]:
    """Weights by network and name."""
    modules = {name: part for name, part in vars(impl.modules).items() if isinstance(part, torch.nn.Module)}
    return {
        f"{name}.{key}": value.detach().numpy().copy()
        for name, module in modules.items()
        for key, value in module.state_dict().items()
    }


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    recorded: dict[str, Any] = {}
    for algorithm, config in configurations().items():
        d3rlpy.seed(1)
        algo = config.create(device="cpu:0")
        algo.create_impl((N_OBSERVATIONS,), 1 if algorithm == "iql" else 2)
        with torch.no_grad():
            for parameter in algo.impl.modules.targ_q_funcs.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
        batch = batch_of(algorithm, np.random.default_rng(2))
        for name in ("observations", "actions", "rewards", "next_observations", "terminals"):
            recorded[f"{algorithm}/{name}"] = getattr(batch, name)
        parts = {"before": weights_of(algo.impl)}
        algo.update(batch)
        parts["after"] = weights_of(algo.impl)
        for part, weights in parts.items():
            recorded |= {f"{algorithm}/{part}/{name}": value for name, value in weights.items()}
    np.savez_compressed(parser.parse_args().file, **recorded)


if __name__ == "__main__":
    main()
