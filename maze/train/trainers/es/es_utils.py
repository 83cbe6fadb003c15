"""Gradient estimate of evolution strategies, and policies as flat parameter vectors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from maze.core.agent.torch_model import TorchModel
from maze.train.trainers.common.observation_statistics import ObservationStatistics
from maze.train.trainers.es.es_shared_noise_table import SharedNoiseTable

# Maximum size of a block of perturbations in a sum (64 MiB).
_NUMBERS_AT_ONCE = 1 << 24


def centered_ranks(returns: np.ndarray) -> np.ndarray:
    """Return the ranks of the returns, scaled to [-0.5, 0.5]; equal returns get their mean rank.

    With ranks, a single extreme episode cannot dominate an update. If ties were broken by position, an update with
    equal returns would follow noise.

    :param returns: Finite numbers of any shape.
    :return: float64 in the shape of the returns, with sum zero.
    """
    flat = np.asarray(returns, np.float64).ravel()
    if flat.size < 2:
        return np.zeros(np.shape(returns))
    _, group, counts = np.unique(flat, return_inverse=True, return_counts=True)
    last = np.cumsum(counts) - 1
    mean_rank = last - (counts - 1) / 2
    return np.asarray(mean_rank[group.ravel()] / (flat.size - 1) - 0.5).reshape(np.shape(returns))


def es_gradient(
    noise_table: SharedNoiseTable, noise_indices: Sequence[int], returns: np.ndarray, n_parameters: int
) -> np.ndarray:
    """Return the gradient estimate of the rank-shaped return (Salimans et al. 2017), for ascent.

    With perturbations e_k, their mirror images, and shaped returns u+ and u-: the sum of (u+ - u-) e_k, divided by the
    number of episodes. It is not divided by the standard deviation of the noise, since the scale of ranks is arbitrary.

    :param noise_table: The noise table.
    :param noise_indices: Position of the perturbation of each pair.
    :param returns: `[n_pairs, 2]`: with the perturbation added and subtracted.
    :param n_parameters: Dimension of a perturbation.
    :return: float32 `[n_parameters]`.
    """
    ranks = centered_ranks(returns)
    weights = ((ranks[:, 0] - ranks[:, 1]) / ranks.size).astype(np.float32)
    gradient = np.zeros(n_parameters, np.float32)
    used = np.flatnonzero(weights)
    block = max(1, _NUMBERS_AT_ONCE // n_parameters)
    for start in range(0, len(used), block):
        part = used[start : start + block]
        noise = np.stack([noise_table.get(noise_indices[index], n_parameters) for index in part])
        gradient += weights[part] @ noise
    return gradient


def trained_parameters(policy: TorchModel) -> list[torch.Tensor]:
    """Return the parameters that are perturbed and updated: all except frozen ones (`requires_grad=False`).

    :return: Parameters in their own shapes `[...]`.
    """
    return [parameter for parameter in policy.parameters() if parameter.requires_grad]


def n_trained_parameters(policy: TorchModel) -> int:
    """Return the number of scalars that are perturbed and updated."""
    return sum(parameter.numel() for parameter in trained_parameters(policy))


def get_flat_parameters(policy: TorchModel) -> torch.Tensor:
    """Return a copy of the trained parameters as one vector on the CPU, in the order of `policy.parameters()`.

    :return: `[n_parameters]`.
    """
    parameters = trained_parameters(policy)
    return torch.cat([parameter.detach().reshape(-1).to("cpu", torch.float32) for parameter in parameters])


def get_flat_weights(policy: TorchModel) -> torch.Tensor:
    """Return everything that determines the actions of a policy: trained parameters and normalization statistics.

    :return: float32 `[n_parameters + n_statistics]`.
    """
    statistics = ObservationStatistics(policy).acting_buffers()
    return torch.cat([get_flat_parameters(policy), *(buffer.reshape(-1).cpu() for buffer in statistics)])


def set_flat_statistics(policy: TorchModel, flat: np.ndarray) -> None:
    """Write normalization statistics into a policy, in place.

    :param policy: The policy.
    :param flat: The part of :func:`get_flat_weights` after the parameters, float32 `[n_statistics]`.
    """
    _write(ObservationStatistics(policy).acting_buffers(), torch.from_numpy(flat.copy()))


def set_flat_parameters(policy: TorchModel, flat_params: torch.Tensor) -> None:
    """Write a vector of parameters into a policy, in place.

    :param policy: The policy.
    :param flat_params: Result of :func:`get_flat_parameters`, `[n_parameters]`.
    :raises ValueError: The length of the vector is wrong.
    """
    n_parameters = n_trained_parameters(policy)
    if flat_params.shape != (n_parameters,):
        raise ValueError(
            f"The policy has {n_parameters} parameters to train, but was given a tensor of shape "
            f"{tuple(flat_params.shape)}."
        )
    _write(trained_parameters(policy), flat_params)


@torch.no_grad()
def _write(tensors: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
    for tensor, part in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view(tensor.shape))
