"""Is the exact posterior written in the residual stream, linearly, and by the training?

An affine probe maps the residual stream of one layer, or of all layers side by side, to the exact posterior. Splitting
by sequence leaks: most short prefixes recur, so the split is by *prefix*: all positions that share their first six
tokens lie in one fold, each read by a probe fitted on the others, and only later positions are reported. A good R²
alone means little, so the same probe also runs on an untrained network of the same shape, on one-hot windows of the
last tokens, on the exact next-token predictive, on shuffled beliefs and on random subspaces of the stream.

Shapes: n sequences, L positions, W residual width, F features, P posterior entries, N kept positions.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pandas as pd
import torch
from torch import Generator, Tensor, nn
from torch.nn import functional
from torch.nn.functional import one_hot

from ..errors import TunnelError
from ..tasks.bits import asked
from ..tasks.protocol import Tunnel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PREFIX, FOLDS = 6, 8


@dataclass(frozen=True)
class BeliefProbe:
    """`scores`: one row per probed source with held-out `r2` and `mse`; `subspaces` (200) R² of random subspaces of
    all layers together.

    `truth` and `predicted` (N, P) are the held-out beliefs and the all-layer probe's reading of them, for pictures.
    """

    scores: pd.DataFrame
    subspaces: Tensor
    truth: Tensor
    predicted: Tensor


@torch.no_grad()
def residual_streams(model: nn.Module, tokens: Tensor, chunk: int = 512) -> list[Tensor]:
    """The residual stream after each block, the last one through the final norm: each (n, L, W) float64."""
    model.eval()
    found: list[list[Tensor]] = []
    for part in tokens.to(next(model.parameters()).device).split(chunk):
        if part.dim() == 2:
            output = model(input_ids=part, output_hidden_states=True)
        else:
            width = model.get_input_embeddings().embedding_dim  # type: ignore[operator]
            padded = functional.pad(part, (0, width - part.shape[-1]))
            output = model(inputs_embeds=padded, output_hidden_states=True)
        found.append([stream.double().cpu() for stream in output.hidden_states[1:]])
    return [torch.cat(streams) for streams in zip(*found, strict=True)]


def prefix_folds(tokens: Tensor, generator: Generator, prefix: int = PREFIX, folds: int = FOLDS) -> Tensor:
    """(n) int64 in 0…folds−1: sequences that share their first `prefix` tokens lie in one fold."""
    if tokens.shape[1] <= prefix:
        raise TunnelError(f"sequences of {tokens.shape[1]} tokens leave nothing to report after a prefix of {prefix}")
    _, group = tokens[:, :prefix].unique(dim=0, return_inverse=True)
    groups = int(group.max()) + 1
    if groups < 2 * folds:
        raise TunnelError(f"{groups} distinct prefixes of {prefix} tokens are too few for {folds} folds")
    return (torch.randperm(groups, generator=generator) % folds)[group]


def held_out_reading(features: Tensor, beliefs: Tensor, fold: Tensor) -> tuple[Tensor, dict[str, float]]:
    """Every row (N, F) read by the affine map fitted on the other folds: readings (N, P), their R² and mean squared
    error.

    R² = 1 − Σ‖error‖² / Σ‖belief − mean belief‖², over all rows and coordinates together.
    """
    reading = torch.empty_like(beliefs)
    for index in fold.unique().tolist():
        reading[fold == index] = affine_fit(features, beliefs, fold != index)
    error = (reading - beliefs).square().sum()
    spread = (beliefs - beliefs.mean(0)).square().sum()
    return reading, {"r2": float(1 - error / spread), "mse": float(error / reading.numel())}


def affine_fit(features: Tensor, beliefs: Tensor, train: Tensor, ridge: float = 1e-6) -> Tensor:
    """Fit beliefs (N, P) ≈ features (N, F) · A + c by least squares on `train` rows; the readings of the others.

    Features are standardised on the training rows; the small ridge only settles directions that carry nothing.
    """
    centre, scale = features[train].mean(0), features[train].std(0)
    scaled = (features - centre) / torch.where(scale > 1e-12, scale, 1.0)
    mean, known = beliefs[train].mean(0), scaled[train]
    gram = known.T @ known / len(known) + ridge * torch.eye(known.shape[1], dtype=torch.float64)
    weights = torch.linalg.solve(gram, known.T @ (beliefs[train] - mean) / len(known))
    return scaled[~train] @ weights + mean


def probe_beliefs(
    tunnel: Tunnel,
    model: nn.Module,
    untrained: nn.Module,
    sequences: int = 2_000,
    seed: int = 0,
    length: int | None = None,
    subspaces: int = 200,
) -> BeliefProbe:
    """Probe `model` and every control on fresh sequences of `tunnel`, at asked positions after the prefix only."""
    generator = Generator().manual_seed((1 << 42) + seed)
    tokens = tunnel.sample(sequences, generator, length).tokens
    predictive = tunnel.predictive(tokens)
    keep = asked(predictive) & (torch.arange(tokens.shape[1]) >= PREFIX)
    fold = prefix_folds(tokens, generator)[:, None].expand_as(keep)[keep]
    beliefs = tunnel.posterior(tokens).values[keep].flatten(1)

    def kept(features: Tensor) -> Tensor:
        return features[keep].double()

    sources: dict[str, Tensor] = {}
    for who, network in (("trained", model), ("untrained", untrained)):
        streams = [kept(stream) for stream in residual_streams(network, tokens)]
        sources |= {f"{who}, layer {layer + 1}": stream for layer, stream in enumerate(streams)}
        sources[f"{who}, all layers"] = torch.cat(streams, 1)
    for window in (2, 3, 5) if tokens.dim() == 2 else ():
        sources[f"one-hot of the last {window} tokens"] = kept(one_hot_window(tokens, window, len(tunnel.vocabulary)))
    sources["exact next-token predictive"] = kept(predictive)
    lines, reading = {}, beliefs
    for who, features in sources.items():
        fitted, lines[who] = held_out_reading(features, beliefs, fold)
        if who == "trained, all layers":
            reading = fitted
    shuffled = beliefs[torch.randperm(len(beliefs), generator=generator)]
    whole = sources["trained, all layers"]
    lines["trained, all layers, shuffled beliefs"] = held_out_reading(whole, shuffled, fold)[1]
    dimension = beliefs.shape[1] - 1
    spread = []
    for _ in range(subspaces):
        axes = torch.linalg.qr(torch.randn(whole.shape[1], dimension, generator=generator, dtype=torch.float64))[0]
        spread.append(held_out_reading(whole @ axes, beliefs, fold)[1]["r2"])
    random = torch.tensor(spread, dtype=torch.float64)
    if subspaces:
        lines[f"{subspaces} random subspaces of {dimension} dimensions, mean"] = {"r2": float(random.mean())}
        lines[f"{subspaces} random subspaces of {dimension} dimensions, best"] = {"r2": float(random.max())}
    scores = pd.DataFrame.from_dict(lines, orient="index").rename_axis("source")
    return BeliefProbe(scores, random, beliefs, reading)


def one_hot_window(tokens: Tensor, window: int, vocabulary: int) -> Tensor:
    """The last `window` tokens, one-hot side by side, zeros before the start: (n, L, window · vocabulary)."""
    hot = one_hot(tokens, vocabulary)
    shifted = [hot]
    for back in range(1, window):
        shifted.append(torch.cat((torch.zeros_like(hot[:, :back]), hot[:, :-back]), 1))
    return torch.cat(shifted, -1)


def simplex_picture(probe: BeliefProbe) -> "Figure":
    """Two panels, exact beliefs and the probe's reading, coloured by the exact belief; a matplotlib figure.

    Three states are drawn in their triangle, more in the first two principal axes of the exact beliefs.
    """
    from ...pictures.figures import panels, title
    from ...pictures.plots import simplex

    truth, read = probe.truth, probe.predicted
    figure, places = panels(1, 2, 3.0)
    colours = truth[:, :3].clamp(0, 1).numpy()
    centre = truth.mean(0)
    axes = torch.linalg.svd(truth - centre, full_matrices=False)[2][:2].T
    for axis, says, points in zip(places, ("exact", "read from the residual stream"), (truth, read)):
        if truth.shape[1] == 3:
            simplex(points.numpy(), colours, ax=axis)
        else:
            flat = ((points - centre) @ axes).numpy()
            axis.scatter(flat[:, 0], flat[:, 1], c=colours, s=3, linewidths=0, rasterized=True)
            axis.set_aspect("equal")
            axis.set_axis_off()
        title(axis, says)
    return figure
