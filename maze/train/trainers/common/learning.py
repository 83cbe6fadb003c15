"""Losses, quantile networks, the gradient step, and the statistics of updates, for all gradient-based algorithms.

Quantiles represent distributions of returns (Dabney et al. 2018, Distributional reinforcement learning with quantile
regression): quantile `i` of `n` has the probability `(i + 0.5) / n`.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from maze.core.agent.flat_adam import FlatAdam
from maze.core.errors import ConfigError, NonFiniteError
from maze.core.events.event_topic_factory import event_methods

Key = Any
"""Group of a number: a sub-step, a critic, an action head."""
Name = tuple[str, Key]
"""Name of a network in an optimizer: the event that reports the norm of its gradient, and its group."""
Row = tuple[str, Any]
"""Event and group of a number; `None`: the event has no group."""


class Losses:
    """The objective of a gradient step, and the numbers to report.

    :param total: The objective so far, a scalar with gradients; `None`: nothing.
    """

    def __init__(self, total: Tensor | None = None) -> None:
        self.terms: list[tuple[str, Key | None, Tensor]] = []
        """Event, group (`None`: the event has none) and value `[]` of the numbers to report."""
        self._total = total

    @property
    def total(self) -> Tensor:
        """The objective so far, a scalar with gradients."""
        return torch.zeros(()) if self._total is None else self._total

    def add(self, value: Tensor, weight: float = 1.0) -> None:
        """Add a term to the total; one without weight is left out, so that nothing is computed for it.

        :param value: A scalar `[]`.
        :param weight: Factor of the term.
        """
        if weight and self._total is not None:
            self._total = torch.add(self._total, value, alpha=weight)
        elif weight:
            self._total = value if weight == 1.0 else value * weight

    def report(self, event: str, value: Tensor, key: Key | None = None, weight: float = 0.0) -> None:
        """Report a number, and add it to the total with a weight.

        :param event: Name of the event that reports it, as the mean of all of a group.
        :param value: A scalar `[]`. It need not be detached.
        :param key: Group of the event (`define_stats_grouping`); `None`: the event has none.
        :param weight: Weight in the total; 0: the number is no part of it.
        """
        self.terms.append((event, key, value))
        self.add(value, weight)


def gradient_step(
    losses: Losses,
    optimizer: FlatAdam,
    max_grad_norm: float = 0.0,
    *,
    frozen: Iterable[Name] = (),
) -> dict[Name, Tensor]:
    """Follow the gradient of the total, unless anything in it is not finite.

    :param losses: The losses.
    :param optimizer: Has the parameters.
    :param max_grad_norm: The gradient of all networks together is scaled down to this norm; 0 leaves it alone.
    :param frozen: Networks that stay as they are; their gradients count for the norm.
    :return: Norm of the gradient of each network before it was scaled, scalars `[]`, to be reported with the losses.
    :raises NonFiniteError: The total or a gradient is not finite; names the first loss, or the network. No parameter
        was changed.
    """
    optimizer.zero_grad()
    if losses.total.requires_grad:
        losses.total.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    norms = optimizer.gradient_norms()
    loss = losses.total.detach()
    each = list(norms.values()) or [torch.zeros_like(loss)]
    joint = each[0] if len(each) == 1 else torch.linalg.vector_norm(torch.stack(each))
    norm, total = torch.stack([joint, loss.to(joint.device)]).tolist()
    if not (math.isfinite(norm) and math.isfinite(total)):
        raise NonFiniteError(_describe_non_finite(losses, norms))
    if 0.0 < max_grad_norm < norm:
        optimizer.scale_gradients(max_grad_norm / norm)
    optimizer.step(frozen=frozen)
    return norms


@contextmanager
def constant(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Return a context in which losses are computed that have no gradients of some parameters.

    :param parameters: The parameters, each `[...]`.
    """
    learned = [parameter for parameter in parameters if parameter.requires_grad]
    for parameter in learned:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in learned:
            parameter.requires_grad_(True)


def scheduled_lr(schedule: str, initial_lr: float, progress: float) -> float:
    """Return the learning rate after a share `progress` (0 to 1) of all updates.

    >>> scheduled_lr("linear", 0.1, 0.75)
    0.025

    :param schedule: `constant`, `linear` or `cosine`; the last two end at 0.
    :param initial_lr: Learning rate at the start.
    :param progress: Share of the updates.
    """
    progress = min(max(progress, 0.0), 1.0)
    if schedule == "linear":
        return initial_lr * (1.0 - progress)
    return initial_lr * (0.5 * (1.0 + math.cos(math.pi * progress)) if schedule == "cosine" else 1.0)


def require_end_of_schedule(schedule: str, n_epochs: int) -> None:
    """Check that a schedule has an end.

    :param schedule: `constant`, `linear` or `cosine`.
    :param n_epochs: Number of epochs; 0: not fixed.
    :raises ConfigError: The number of epochs is not fixed, and the schedule is not `constant`.
    """
    if n_epochs == 0 and schedule != "constant":
        raise ConfigError(
            f"algorithm.lr_schedule: `{schedule}` needs the number of epochs; set `algorithm.n_epochs`, or use "
            "`constant`."
        )


def mean_of(values: Tensor, weight: Tensor | None) -> Tensor:
    """Return the mean of the elements of weight 1; 0 if there are none. Elements of weight 0 need not be finite.

    :param values: `[batch]`.
    :param weight: 0 or 1 for each element, floats `[batch]`; `None`: all elements count.
    :return: `[]`.
    """
    if weight is None:
        return values.mean()
    return values.masked_fill(weight == 0.0, 0.0).sum() / weight.sum().clamp(min=1.0)


def _describe_non_finite(losses: Losses, norms: Mapping[Name, Tensor]) -> str:
    found = [term for term in losses.terms if "loss" in term[0]] + [("the loss", None, losses.total)]
    found += [(event, key, norm) for (event, key), norm in norms.items()]
    for event, key, tensor in found:
        if not math.isfinite(value := tensor.item()):
            of = "" if key is None else f" of {'critic' if event.startswith('critic') else 'sub-step'} {key!r}"
            break
    else:
        event, of, value = "the norm of all gradients together", "", math.inf
    return (
        f"{event}{of} is {value}; the step was not applied. Look for extreme rewards or observations, or lower the "
        "learning rate."
    )


class UpdateStats:
    """Collect the values of the events of an interface, and fire their means.

    Rows come in the order of the interface; where successive events have the same kind of group, all of one group come
    together.

    :param interface: The events. :class:`~maze.train.trainers.common.learning.Losses` reports to events with a value,
        or with a group and a value.
    """

    def __init__(self, interface: type[Any]) -> None:
        self._interface = interface
        self._parameters = {
            name: list(inspect.signature(method).parameters)[1:] for name, method in event_methods(interface).items()
        }
        blocks = itertools.groupby(self._parameters.items(), key=lambda item: item[1][:1])
        self._blocks = {name: index for index, (_, events) in enumerate(blocks) for name, _ in events}
        # Sums, and number of gradient steps, of those that report the same things.
        self._sums: dict[tuple[Row, ...], tuple[Tensor, int]] = {}
        self._values: dict[Row, list[tuple[float, ...]]] = {}

    @torch.no_grad()
    def add(self, losses: Losses, gradient_norms: Mapping[Name, Tensor] | None = None) -> None:
        """Add the losses and gradient norms of a gradient step.

        :param losses: Its losses.
        :param gradient_norms: Norms by network, scalars `[]`; those of an agent count for its sub-step.
        :raises ConfigError: The interface has no event of a loss's name.
        """
        terms = list(losses.terms)
        for (event, key), norm in (gradient_norms or {}).items():
            terms.append((event, key[0] if isinstance(key, tuple) else key, norm))
        if not terms:
            return
        rows = tuple([(event, key) for event, key, _ in terms])
        values = torch.stack([value for _, _, value in terms])
        if rows not in self._sums:
            self._check(rows)
            self._sums[rows] = (torch.zeros_like(values, dtype=torch.float64), 0)
        total, count = self._sums[rows]
        self._sums[rows] = (total.add_(values), count + 1)

    def add_value(self, event: str, *values: float, group: Key | None = None) -> None:
        """Add the arguments of an event, which is left out where the interface has no such event.

        :param event: The event.
        :param values: Its arguments, without the group; those that the event does not have are left out.
        :param group: Group of the values; `None`: the event has no group.
        """
        if event in self._parameters:
            self._values.setdefault((event, group), []).append(values)

    def publish(self, events: Any) -> None:
        """Fire the mean of each event and group, and start over; this is the only place that waits for the device.

        :param events: Topic of the interface.
        """
        totals: dict[Row, float] = {}
        counts: dict[Row, int] = {}
        for rows, (total, count) in self._sums.items():
            for row, value in zip(rows, total.tolist(), strict=True):
                totals[row] = totals.get(row, 0.0) + value
                counts[row] = counts.get(row, 0) + count
        calls: dict[Row, tuple[Any, ...]] = {}
        for (event, key), summed in totals.items():
            mean = summed / counts[event, key]
            calls[event, key] = (mean,) if key is None else (key, mean)
        for (event, key), given in self._values.items():
            means = tuple(sum(values) / len(values) for values in zip(*given, strict=True))
            calls[event, key] = (*([] if key is None else [key]), *means)[: len(self._parameters[event])]
        order = list(self._parameters)
        groups = list(dict.fromkeys(key for _, key in calls))
        for row in sorted(calls, key=lambda row: (self._blocks[row[0]], groups.index(row[1]), order.index(row[0]))):
            getattr(events, row[0])(*calls[row])
        self._sums.clear()
        self._values.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the values collected so far."""
        sums = [(list(rows), total.clone(), count) for rows, (total, count) in self._sums.items()]
        values = [(*row, list(given)) for row, given in self._values.items()]
        return {"sums": sums, "values": values}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a state that :meth:`state_dict` returned; values collected before are dropped.

        :param state_dict: The state, which is copied.
        """
        self._sums = {
            tuple((event, key) for event, key in rows): (total.clone(), count)
            for rows, total, count in state_dict["sums"]
        }
        self._values = {(event, key): list(given) for event, key, given in state_dict["values"]}

    def _check(self, rows: tuple[Row, ...]) -> None:
        for event, key in rows:
            n_arguments = len(self._parameters.get(event, ()))
            if n_arguments != (1 if key is None else 2):
                wanted = "a value" if key is None else "a group and a value"
                found = f"one with {n_arguments} arguments" if n_arguments else f"only {', '.join(self._parameters)}"
                raise ConfigError(
                    f"Losses.report: expected an event `{event}` with {wanted} in {self._interface.__name__}, found "
                    f"{found}."
                )


# -- quantiles of returns --------------------------------------------------------------------------


def quantile_huber_loss(quantiles: Tensor, targets: Tensor, kappa: float = 1.0) -> Tensor:
    """Return the quantile Huber loss (Dabney et al. 2018, equation 10), averaged over quantiles and samples.

    The average over quantiles, not the paper's sum, makes its size independent of their number.

    :param quantiles: Predicted quantiles in ascending order, `[..., n_quantiles]`.
    :param targets: Samples of the distribution, `[..., n_samples]`.
    :param kappa: Half-width of the quadratic part; 0: the quantile regression loss.
    :return: `[...]`.
    """
    n_quantiles = quantiles.shape[-1]
    levels = (torch.arange(n_quantiles, dtype=quantiles.dtype, device=quantiles.device) + 0.5) / n_quantiles
    error = targets.unsqueeze(-2) - quantiles.unsqueeze(-1)
    size = error.abs()
    if kappa > 0.0:
        quadratic = size.clamp(max=kappa)
        size = quadratic * (size - 0.5 * quadratic) / kappa
    weight = (levels.unsqueeze(-1) - (error.detach() < 0.0).to(levels)).abs()
    loss: Tensor = (weight * size).mean((-2, -1))
    return loss


def output_layer(network: nn.Module, sizes: Sequence[int]) -> nn.Linear | None:
    """Return the last linear layer with one of the output sizes; `None`: there is none.

    :param network: The network. The order is that in which its modules were registered, not that of evaluation.
    :param sizes: Numbers of outputs.
    """
    layers = [layer for layer in network.modules() if isinstance(layer, nn.Linear) and layer.out_features in sizes]
    return layers[-1] if layers else None


def no_output_layer(what: str) -> ConfigError:
    """Return the error for a network without an output layer.

    :param what: Name of the network.
    """
    return ConfigError(
        f"algorithm.risk: expected a linear layer (torch.nn.Linear) at the end of {what}, beside which quantiles are "
        "predicted; found none with its number of outputs."
    )


def widen(network: nn.Module, n_quantiles: int, what: str) -> None:
    """Replace the output layer of a network of values by one that predicts quantiles.

    :param network: The network; it is changed.
    :param n_quantiles: Number of quantiles.
    :param what: Name of the network in messages.
    :raises ConfigError: The network does not end with a linear layer.
    """
    layer = output_layer(network, (1,))
    if layer is None:
        raise no_output_layer(what)
    wide = nn.Linear(layer.in_features, n_quantiles).to(layer.weight.device)
    for module in list(network.modules()):
        for name, child in list(module.named_children()):
            if child is layer:
                setattr(module, name, wide)


class QuantileHead(nn.Module):
    """Quantiles of the outputs of a network, beside its output layer and from the same features.

    :param layer: The output layer, with `n_outputs` outputs, or with one for each item of a set.
    :param n_outputs: Number of outputs of the network.
    :param n_quantiles: Number of quantiles of each output.
    """

    def __init__(self, layer: nn.Linear, n_outputs: int, n_quantiles: int) -> None:
        super().__init__()
        self._layer = (layer,)  # a tuple: its parameters are the network's
        self._shape = (n_outputs, n_quantiles)
        self._features: list[Tensor] = []
        self.net = nn.Linear(layer.in_features, layer.out_features * n_quantiles).to(layer.weight.device)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Return a context in which the network is evaluated before the head."""
        (layer,) = self._layer
        self._features.clear()
        hook = layer.register_forward_pre_hook(lambda _, given: self._features.append(given[0]))
        try:
            yield
        finally:
            hook.remove()

    def forward(self) -> Tensor:
        """Return the quantiles of the latest evaluation, `[B, n_outputs, n_quantiles]`."""
        quantiles: Tensor = self.net(self._features[-1])
        return quantiles.reshape(-1, *self._shape)
