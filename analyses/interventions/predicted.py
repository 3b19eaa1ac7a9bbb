"""Predicted and measured change of the loss under the law's own steps, and how far the prediction reaches.

A step of one head's values by −η m or of its scores by −η D changes the loss by −η‖m‖² or −η‖D‖² to first order. That the
ratio of measured to predicted tends to 1 as η → 0 is the definition of a derivative: it tests code. What informs is the
*linear radius*, the η at which the ratio leaves [0.9, 1.1], beside the step that training really takes.

Everything runs in float64. Shapes: B sequences, H query heads, K key/value heads, Q = S positions, V value width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...hooks.attach import calls, edited, within_one_sequence
from ...hooks.call import AttentionCall, CallSite
from ...hooks.errors import BadRequest, NoAttentionSeen
from ...hooks.site import Site
from ...probe.law.definition import law
from ...probe.state import Key, label
from ..inputs.corpus import Batch
from ..inputs.precision import double

Step = Literal["values", "scores"]

SMALLEST = 1e-12  # of the loss: squared gradients below this are listed, not divided by
TARGETS = tuple(10.0 ** (power / 2) for power in range(-16, -1))  # predicted change over loss: 1e-8 … 1e-1
LOW, HIGH = 0.9, 1.1


@dataclass(eq=False)
class _Gradients:
    """Keeps, per call, m summed over each group (B,K,S,V), D (B,H,Q,S), values and log-attention."""

    value_gradient: dict[Key, Tensor] = field(default_factory=dict)
    score_gradient: dict[Key, Tensor] = field(default_factory=dict)
    value: dict[Key, Tensor] = field(default_factory=dict)
    attention: dict[Key, Tensor] = field(default_factory=dict)

    def keep(self, call: AttentionCall) -> None:
        whole = law(call)
        key = Key(call.site, call.use)
        self.value_gradient[key] = whole.value_gradient.unflatten(1, (-1, call.group)).sum(2)
        self.score_gradient[key], self.value[key] = whole.score_gradient, call.value.detach().clone()
        self.attention[key] = whole.attention


@dataclass(eq=False)
class _Stepper:
    """Takes a step of one head of one call: its values by −η m, or its scores by −η D."""

    step: Step
    key: Key
    head: int
    size: float
    gradient: Tensor

    def wanted(self, site: Site) -> bool:
        return site == self.key.site

    def value(self, call: CallSite, value: Tensor) -> Tensor:
        if self.step != "values" or call.use != self.key.use:
            return value
        moved = value.clone()
        moved[:, self.head] -= self.size * self.gradient[:, self.head]
        return moved

    def output(self, call: AttentionCall) -> Tensor:
        if self.step != "scores" or call.use != self.key.use:
            return call.output
        whole = law(call)
        attention, sink = whole.attention[:, self.head], whole.sink[:, self.head, :, None]
        steps = -self.size * self.gradient[:, self.head]
        grown = attention * torch.exp(steps)
        now = grown / (grown.sum(-1, keepdim=True) + sink).clamp(min=torch.finfo(grown.dtype).tiny)
        output = call.output.clone()
        output[:, self.head] += (now - attention) @ call.value[:, self.head // call.group]
        return output


class _NeverLess(TorchFunctionMode):
    """Models cast to float32 in norms and softmax whatever they were loaded in; float64 tensors stay float64 here."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            name = getattr(func, "__name__", "")
            if name == "float":
                return args[0]
            if name in ("to", "softmax", "log_softmax", "mean", "sum") and kwargs.get("dtype") == torch.float32:
                kwargs["dtype"] = torch.float64
            if name in ("to", "type") and torch.float32 in args[1:]:
                args = tuple(torch.float64 if part is torch.float32 else part for part in args)
        return func(*args, **kwargs)


def mean_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross-entropy over targets, nats, of a float64 model, in float64 throughout."""
    with _NeverLess():
        logits = model(input_ids=batch.ids, attention_mask=batch.mask, use_cache=False).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())


def _gradients(model: nn.Module, batch: Batch) -> tuple[_Gradients, float]:
    receiver = _Gradients()
    with calls(model, receiver.keep, wanted=within_one_sequence):
        loss = mean_loss(model, batch)
        loss.backward()
    if not receiver.value:
        raise NoAttentionSeen(f"{type(model).__name__} made no attention call that the probe can read.")
    return receiver, loss.item()


def _names(receiver: _Gradients, step: Step) -> list[tuple[Key, int, str]]:
    found = []
    for key in sorted(receiver.value, key=lambda key: (key.site.layer, key)):
        gradient = receiver.value_gradient[key] if step == "values" else receiver.score_gradient[key]
        shared = step == "values" and gradient.shape[1] < receiver.score_gradient[key].shape[1]
        for head in range(gradient.shape[1]):
            found.append((key, head, label(key, head, letter="KV" if shared else "H")))
    return found


def predicted_and_measured(
    model: nn.Module, batch: Batch, step: Step, targets: Sequence[float] = TARGETS
) -> pd.DataFrame:
    """Steps of every head, sized so that the predicted change is each of `targets` times the loss.

    Returns:
        One row per head and size: `head`, `step`, `eta`, `predicted`, `measured` (nats), `ratio`; heads whose squared
        gradient is below 1e-12 of the loss are listed once with NaN.

    Raises:
        BadRequest: for an unknown step.
    """
    if step not in ("values", "scores"):
        raise BadRequest(f'step must be "values" or "scores", not {step!r}.')
    exact = double(model).requires_grad_(False)
    receiver, loss = _gradients(exact, batch)
    rows = []
    for key, head, name in _names(receiver, step):
        gradient = receiver.value_gradient[key] if step == "values" else receiver.score_gradient[key]
        square = float(gradient[:, head].square().sum())
        if square < SMALLEST * loss:
            rows.append([name, step, np.nan, np.nan, np.nan, np.nan])
            continue
        for target in targets:
            eta = target * loss / square
            stepper = _Stepper(step, key, head, eta, gradient)
            with edited(exact, value=stepper.value, output=stepper.output, wanted=stepper.wanted), torch.no_grad():
                measured = mean_loss(exact, batch).item() - loss
            rows.append([name, step, eta, -target * loss, measured, measured / (-target * loss)])
    return pd.DataFrame(rows, columns=["head", "step", "eta", "predicted", "measured", "ratio"])


def linear_radius(eta: Sequence[float], ratio: Sequence[float]) -> float:
    """The η at which measured over predicted leaves [0.9, 1.1], between the two sizes around it by its logarithm; infinite
    when it stays inside, NaN when it starts outside.
    """
    order = np.argsort(eta)
    sizes, ratios = np.asarray(eta)[order], np.asarray(ratio)[order]
    outside = (ratios < LOW) | (ratios > HIGH)
    if not len(sizes) or np.isnan(ratios).any() or outside[0]:
        return float("nan")
    if not outside.any():
        return float("inf")
    place = int(outside.argmax())
    edge = LOW if ratios[place] < LOW else HIGH
    share = (edge - ratios[place - 1]) / (ratios[place] - ratios[place - 1])
    return float(np.exp(np.log(sizes[place - 1]) + share * (np.log(sizes[place]) - np.log(sizes[place - 1]))))


def training_step(
    model: nn.Module, batch: Batch, optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
) -> dict[Step, dict[str, float]]:
    """How far one step of training on the batch moves each head, in units of the law's own step: ‖Δv‖/‖m‖ for values,
    ‖Δs‖/‖D‖ for scores (up to a constant per row), of a float64 copy; the model itself is not changed.
    """
    exact = double(model).requires_grad_(True)
    rule = optimizer([parameter for parameter in exact.parameters() if parameter.requires_grad])
    before, _ = _gradients(exact, batch)
    rule.step()
    rule.zero_grad()
    after, _ = _gradients(exact, batch)
    found: dict[Step, dict[str, float]] = {"values": {}, "scores": {}}
    for key, head, name in _names(before, "values"):
        moved = (after.value[key] - before.value[key])[:, head].norm()
        found["values"][name] = float(moved / before.value_gradient[key][:, head].norm())
    tiny = torch.finfo(torch.float64).tiny
    for key, head, name in _names(before, "scores"):
        was, now = before.attention[key][:, head], after.attention[key][:, head]
        seen = was > 0
        moved = torch.where(seen, now.clamp(min=tiny).log() - was.clamp(min=tiny).log(), 0.0)
        mean = moved.sum(-1, keepdim=True) / seen.sum(-1, keepdim=True).clamp(min=1)
        moved = torch.where(seen, moved - mean, 0.0).norm()
        found["scores"][name] = float(moved / before.score_gradient[key][:, head].norm())
    return found


def reach(
    model: nn.Module,
    batch: Batch,
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    targets: Sequence[float] = TARGETS,
) -> pd.DataFrame:
    """One row per head and step: `radius` (η), `real` (the η to which one training step amounts), `real_over_radius`
    (below 1: the law's first order describes that step), `note`.
    """
    real = training_step(model, batch, optimizer)
    rows = []
    steps: tuple[Step, ...] = ("values", "scores")
    for step in steps:
        table = predicted_and_measured(model, batch, step, targets)
        for name, part in table.groupby("head", sort=False):
            if part["eta"].isna().any():
                rows.append([name, step, np.nan, real[step][str(name)], np.nan, "gradient below 1e-12 of the loss"])
                continue
            radius = linear_radius(part["eta"].to_numpy(), part["ratio"].to_numpy())
            size = real[step][str(name)]
            note = "linear over the whole range" if np.isinf(radius) else ""
            rows.append([name, step, radius, size, size / radius, note])
    return pd.DataFrame(rows, columns=["head", "step", "radius", "real", "real_over_radius", "note"])
