"""How far a model's probabilities are from the exact predictive, in bits, with every trivial rival in the rows above.

Two entropy errors go under their own names because they differ: `entropy_error` is mean |H_model − H_exact| over
sequences and supervised positions; `entropy_error_of_means` first averages entropies over sequences and then takes |·|
per position, so that signed errors cancel. Model probabilities are renormalised over the outcomes; the mass outside
them is reported. The sampling unit of intervals is the sequence.

Shapes: n sequences, L positions, O outcomes.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pandas as pd
import torch
from torch import Generator, Tensor, nn

from ..errors import TunnelError
from ..tasks.bits import asked, entropy_bits, kl_bits, total_variation
from ..tasks.protocol import Episodes, Tunnel
from ..training.models import logits

HELD_OUT = 2**41  # base of the generator seeds of held-out sequences; training and its curve use others
Z95 = 1.959963984540054


@dataclass(frozen=True)
class Errors:
    """Errors of one set of probabilities against the exact predictive, all (n, L), NaN where nothing is asked.

    `entropy` and `exact_entropy` in bits, `kl` = KL(exact ‖ rows) in bits, `variation` total variation, `outside` the
    probability that fell on no outcome before renormalising.
    """

    entropy: Tensor
    exact_entropy: Tensor
    kl: Tensor
    variation: Tensor
    outside: Tensor

    def where(self, keep: Tensor) -> "Errors":
        """The same with positions outside the (n, L) mask `keep` set to NaN."""
        fields = (self.entropy, self.exact_entropy, self.kl, self.variation, self.outside)
        return Errors(*(torch.where(keep, values, math.nan) for values in fields))


@torch.no_grad()
def model_rows(
    model: nn.Module,
    tokens: Tensor,
    outcomes: tuple[int, ...],
    forward: Callable[[nn.Module, Tensor], Tensor] = logits,
    chunk: int = 256,
) -> tuple[Tensor, Tensor]:
    """Probabilities renormalised over the outcomes, (n, L, O) float64, and the mass outside them, (n, L)."""
    training, parameter = model.training, next(model.parameters(), tokens)
    model.eval()
    rows, outside = [], []
    for part in tokens.split(chunk):
        whole = forward(model, part.to(parameter.device)).double().softmax(-1).cpu()
        inside = whole[..., list(outcomes)]
        mass = inside.sum(-1)
        rows.append(inside / mass[..., None])
        outside.append(1 - mass)
    model.train(training)
    return torch.cat(rows), torch.cat(outside).clamp(min=0)


def errors(rows: Tensor, truth: Tensor, outside: Tensor | None = None) -> Errors:
    """Compare (n, L, O) `rows` with the exact predictive `truth`."""
    if rows.shape != truth.shape:
        raise TunnelError(
            f"probabilities {tuple(rows.shape)} and the exact predictive {tuple(truth.shape)} differ in shape"
        )
    where = asked(truth)
    outside = torch.zeros(where.shape, dtype=torch.float64) if outside is None else outside
    found = Errors(
        entropy_bits(rows), entropy_bits(truth), kl_bits(truth, rows), total_variation(truth, rows), outside.double()
    )
    return found.where(where)


def summary(found: Errors) -> dict[str, float]:
    """One row of a table: means over sequences of their means over asked positions, each with its 95 % half-width."""
    gap = (found.entropy - found.exact_entropy).abs()
    row: dict[str, float] = {}
    for name, values in (
        ("entropy_error", gap),
        ("kl", found.kl),
        ("total_variation", found.variation),
        ("outside", found.outside),
    ):
        per_sequence = values.nanmean(1)
        per_sequence = per_sequence[~per_sequence.isnan()]
        row[name] = float(per_sequence.mean())
        spread = float(per_sequence.std()) if len(per_sequence) > 1 else math.nan
        row[f"{name}_ci"] = Z95 * spread / math.sqrt(len(per_sequence)) if len(per_sequence) else math.nan
    means = (found.entropy.nanmean(0) - found.exact_entropy.nanmean(0)).abs()
    row["entropy_error_of_means"] = float(means.nanmean())
    return row


def table(
    tunnel: Tunnel, rows: Mapping[str, tuple[Tensor, Tensor]], episodes: Episodes, keep: Tensor | None = None
) -> pd.DataFrame:
    """Every baseline of the tunnel, then every entry of `rows` (probabilities and outside mass); bits, one row each.

    `keep` (n, L) restricts all rows to the same positions. A NaN-free index named "who" puts the rivals first.
    """
    truth = tunnel.predictive(episodes.tokens)
    scored: dict[str, Errors] = {
        name: errors(rival, truth) for name, rival in tunnel.baselines(episodes.tokens).items()
    }
    scored |= {name: errors(found, truth, outside) for name, (found, outside) in rows.items()}
    if keep is not None:
        scored = {name: found.where(keep) for name, found in scored.items()}
    lines = {name: summary(found) for name, found in scored.items()}
    return pd.DataFrame.from_dict(lines, orient="index").rename_axis("who")


def by_position(found: Errors) -> pd.DataFrame:
    """Per position: exact and model entropy, |difference|, KL, total variation, outside mass, and 95 % half-widths
    over sequences.
    """
    gap = (found.entropy - found.exact_entropy).abs()
    columns = {
        "exact_entropy": found.exact_entropy,
        "entropy": found.entropy,
        "entropy_error": gap,
        "kl": found.kl,
        "total_variation": found.variation,
        "outside": found.outside,
    }
    frame: dict[str, list[float]] = {}
    for name, values in columns.items():
        count = (~values.isnan()).sum(0)
        mean = values.nanmean(0)
        spread = ((values - mean) ** 2).nansum(0) / (count - 1).clamp(min=1)
        frame[name] = mean.tolist()
        if name not in ("exact_entropy", "entropy"):
            frame[f"{name}_ci"] = (Z95 * (spread / count.clamp(min=1)).sqrt()).tolist()
    positions = pd.DataFrame(frame).rename_axis("position")
    return positions[positions["exact_entropy"].notna()]


def held_out(tunnel: Tunnel, sequences: int = 2_000, seed: int = 0, length: int | None = None) -> Episodes:
    """Sequences that no training step of any seed has drawn from the same generator."""
    return tunnel.sample(sequences, Generator().manual_seed(HELD_OUT + seed), length)


def calibrate(
    tunnel: Tunnel,
    models: Mapping[str, nn.Module],
    sequences: int = 2_000,
    seed: int = 0,
    length: int | None = None,
    forward: Callable[[nn.Module, Tensor], Tensor] = logits,
) -> pd.DataFrame:
    """`table` of freshly drawn held-out sequences: the tunnel's rivals first, then each model."""
    episodes = held_out(tunnel, sequences, seed, length)
    rows = {name: model_rows(model, episodes.tokens, tunnel.outcomes, forward) for name, model in models.items()}
    return table(tunnel, rows, episodes)
