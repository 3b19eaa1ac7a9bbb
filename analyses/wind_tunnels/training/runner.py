"""Training in a tunnel: fresh episodes at every step, hard sampled targets, resumable at any moment.

The episodes of step t come from a generator seeded with (seed, t), so that a resumed run sees what the uninterrupted
one would have seen and continues the same curve. Supervision is `Episodes.loss`, never Hugging Face's `labels=`. With
`distilled` the target is the exact predictive itself instead of one draw from it.

Shapes: n episodes, L positions, O outcomes.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor, nn

from ....probe.watch import Watch, watch
from ...files.names import HISTORY
from ..errors import TunnelError, UnusableCheckpoint
from ..tasks.bits import asked, entropy_bits, kl_bits
from ..tasks.protocol import Episodes, Tunnel
from .checkpoints import load_run, save_model, save_run
from .models import build, logits, parameter_count
from .recipes import Recipe

HELD_OUT_SEED = 2**40  # far from every training step's seed
Forward = Callable[[nn.Module, Tensor], Tensor]
Progress = Callable[[int, int, str], None]


class Runner:
    """A model and its optimizer at some step of a recipe, for whoever trains in tunnels.

    Args:
        tunnel, recipe: what decides the episodes and the rate of every step.
        model: on its device; put in train mode.
        state: as `state()` gave it, to go on from; it is not changed.
        forward: logits of (model, tokens).
    """

    def __init__(
        self,
        tunnel: Tunnel,
        recipe: Recipe,
        model: nn.Module,
        state: dict[str, Any] | None = None,
        *,
        forward: Forward = logits,
    ) -> None:
        self.tunnel, self.recipe, self.model, self.forward = tunnel, recipe, model, forward
        self.optimizer = torch.optim.AdamW(_decayed(model, recipe.weight_decay), lr=recipe.learning_rate)
        self.step = self.targets = 0
        if state is not None:
            model.load_state_dict(state["model"])
            # the optimizer would go on in the tensors it is given, and a state is used more than once
            self.optimizer.load_state_dict(
                copy.deepcopy(state["optimizer"] if "optimizer" in state else state["optimiser"])
            )
            self.step = int(state["step"])
        model.train()

    def state(self) -> dict[str, Any]:
        """Weights, optimizer and step: what going on needs."""
        parts = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        return {**parts, "step": self.step}

    def loss(self, step: int) -> Callable[[nn.Module], Tensor]:
        """The loss that step `step` trains on: mean cross-entropy, nats."""
        episodes = training_episodes(self.tunnel, self.recipe, step)

        def loss(model: nn.Module) -> Tensor:
            tokens = episodes.tokens.to(next(model.parameters()).device)
            return objective(self.tunnel, episodes, self.forward(model, tokens), self.recipe.distilled)

        self.targets = int((episodes.targets >= 0).sum())
        return loss

    def advance(self, restore: Callable[[], None] | None = None) -> float:
        """One optimizer step; returns the training loss before it, nats. `restore` undoes what must not move."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.recipe, self.step)
        loss = self.loss(self.step)(self.model)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip)
        self.optimizer.step()
        if restore is not None:
            restore()
        self.step += 1
        return float(loss.detach())


def training_episodes(tunnel: Tunnel, recipe: Recipe, step: int) -> Episodes:
    """The episodes of training step `step`, drawn from (seed, step)."""
    length = episode_length(recipe, tunnel.length, step)
    batch = recipe.batch * tunnel.length // length
    return tunnel.sample(batch, Generator().manual_seed((recipe.seed << 24) + step), length)


def usable(device: str) -> torch.device:
    """The device of that name.

    Raises:
        TunnelError: where it is none, or cannot be used here.
    """
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as refusal:
        raise TunnelError(f"no device {device!r} can be used here: {str(refusal).splitlines()[0]}") from refusal


def train(
    tunnel: Tunnel,
    recipe: Recipe,
    folder: Path | None = None,
    *,
    name: str = "",
    command: str = "",
    resume: bool = False,
    interval: int | None = None,
    model: nn.Module | None = None,
    forward: Forward = logits,
    progress: Progress | None = None,
    device: str = "cpu",
    seen: Watch | None = None,
) -> tuple[nn.Module, list[dict[str, float]]]:
    """Train a model of `recipe.shape` (or `model`) on `tunnel`; returns it in eval mode with the curve.

    Every `interval` steps (default: a fiftieth of the run) the held-out error is appended to the curve and, with a
    `folder`, the run is saved atomically; `resume` continues from there. A curve row holds step, loss (nats, mean
    since the row before), entropy_error and kl (bits). `progress` is told (steps done, in all, note); `seen` is a watch
    of `model`, told of every step; see `train_watched`. Raises `UnusableCheckpoint` if the saved run had other settings,
    `TunnelError` if the loss stops being finite.
    """
    interval = interval or max(1, recipe.steps // 50)
    model = build(recipe.shape, tunnel, recipe.seed) if model is None else model
    model = model.to(usable(device))
    identity = {"name": name, "recipe": asdict(recipe), "interval": interval}
    saved = load_run(folder) if resume and folder is not None else None
    if saved is not None and saved["identity"] != identity:
        raise UnusableCheckpoint(f"{folder} holds a run with other settings: give another --out or drop --resume")
    runner = Runner(tunnel, recipe, model, saved, forward=forward)
    curve: list[dict[str, float]] = [] if saved is None else saved["curve"]
    held_out = tunnel.sample(256, Generator().manual_seed(HELD_OUT_SEED + recipe.seed))
    truth = tunnel.predictive(held_out.tokens)
    total = 0.0
    note = ""
    while runner.step < recipe.steps:
        loss = runner.advance()
        if seen is not None:
            seen.step(loss_weight=1 / runner.targets)
        total += loss
        step = runner.step
        if not math.isfinite(total):
            raise TunnelError(f"the loss is {loss} at step {step - 1}: lower the learning rate")
        if step % interval == 0 or step == recipe.steps:
            since = step - (int(curve[-1]["step"]) if curve else 0)
            error, divergence = held_out_error(model, held_out, truth, tunnel.outcomes, forward)
            row = {"step": step, "loss": total / since, "entropy_error": error, "kl": divergence}
            curve.append({key: round(value, 6) for key, value in row.items()})
            total = 0.0
            if seen is not None:
                seen.flush()
            if folder is not None:
                save_run(folder, {"identity": identity, "curve": curve, **runner.state()})
            note = f"entropy error {error:.4f} bits, KL {divergence:.5f}"
        if progress is not None:
            progress(step, recipe.steps, note)
    model.eval()
    if folder is not None:
        save_model(folder, model, card(name, recipe, command, curve, model))
    return model, curve


def train_watched(
    tunnel: Tunnel, recipe: Recipe, folder: Path, every: int, *, resume: bool = False, **settings: Any
) -> tuple[nn.Module, list[dict[str, float]]]:
    """As `train`, with every head watched at every n-th step; their history lies in the folder beside the run."""
    model = build(recipe.shape, tunnel, recipe.seed)
    saved = load_run(folder) if resume else None
    with watch(model, every=every, history=folder / HISTORY) as seen:
        seen.seek(0 if saved is None else int(saved["step"]))
        return train(tunnel, recipe, folder, resume=resume, model=model, seen=seen, **settings)


def learning_rate(recipe: Recipe, step: int) -> float:
    """Linear warm-up over `warm_up` steps, then half a cosine down to a fiftieth of the peak at the last step."""
    warm = min(1.0, (step + 1) / max(1, recipe.warm_up))
    done = max(0.0, (step - recipe.warm_up) / max(1, recipe.steps - recipe.warm_up))
    return recipe.learning_rate * warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


def objective(tunnel: Tunnel, episodes: Episodes, output: Tensor, distilled: bool) -> Tensor:
    """Mean cross-entropy in nats of logits (n, L, vocabulary): against the sampled targets, or the exact predictive if
    `distilled`.
    """
    if not distilled:
        return episodes.loss(output)
    where = episodes.targets >= 0
    exact = tunnel.predictive(episodes.tokens)[where].to(output.device, output.dtype)
    return -(exact * output[where.to(output.device)].log_softmax(-1)[:, list(tunnel.outcomes)]).sum(-1).mean()


def episode_length(recipe: Recipe, whole: int, step: int) -> int:
    """Positions of the episodes of `step`: from `first_length` to `whole` over `growth` steps."""
    if step >= recipe.growth:
        return whole
    return min(whole, recipe.first_length + (whole - recipe.first_length) * step // recipe.growth)


@torch.no_grad()
def held_out_error(
    model: nn.Module, episodes: Episodes, truth: Tensor, outcomes: tuple[int, ...], forward: Forward = logits
) -> tuple[float, float]:
    """Mean |H_model − H_exact| and mean KL(exact ‖ model), bits, over every asked position, renormalised over the
    outcomes.
    """
    training = model.training
    model.eval()
    tokens = episodes.tokens.to(next(model.parameters()).device)
    rows = forward(model, tokens)[..., list(outcomes)].double().softmax(-1).cpu()
    model.train(training)
    where = asked(truth)
    rows, exact = rows[where], truth[where]
    error = (entropy_bits(rows) - entropy_bits(exact)).abs().mean()
    return float(error), float(kl_bits(exact, rows).mean())


def card(name: str, recipe: Recipe, command: str, curve: list[dict[str, float]], model: nn.Module) -> dict[str, Any]:
    """What lies beside the weights: tunnel, command, recipe, versions and the log figures of the run."""
    import transformers

    return {
        "tunnel": name,
        "command": command,
        "recipe": asdict(recipe),
        "parameters": parameter_count(model),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "threads": torch.get_num_threads(),
        "units": {"loss": "nats", "entropy_error": "bits", "kl": "bits"},
        "curve": curve,
    }


def _decayed(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Decay matrices, leave gains and biases alone."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
