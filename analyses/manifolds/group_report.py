"""The value manifold of a model: keys in groups, their curve, and everything that it is held against.

For a tunnel's model the vectors of every layer, trained and untrained, on the same fresh episodes; for a pretrained one the
last token of the shipped prompts in bins of the model's own predictive entropy, beside the same network with fresh weights.

Shapes: n episodes, L positions, N rows, d numbers in a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import nn

from ...hooks.errors import BadRequest
from ..inputs.prompts import Prompts, residualised
from ..intervals.nulls import DRAWS
from ..vectors.collecting import Where, collect
from ..weights.keys import fresh
from ..wind_tunnels.tasks.protocol import Episodes
from ..wind_tunnels.truth.against_truth import batches as episode_batches
from ..wind_tunnels.truth.shipped import load as load_tunnel
from ..wind_tunnels.truth.shipped import untrained_like
from .group_curve import GroupCurve, curve, shares
from .groups import FEWEST, Group, Groups, Kept, Marks, first_key, grouped, kept, marks_of, one_position
from .held_out import halves, orders
from .stages import unit
from .verdict import Placed, over_seeds, placed
from .verdict import table as verdict_table

Array = NDArray[np.float64]
Note = Callable[[int, int, str], None]

EPISODES = 512
POINTS = 1_500  # drawn of one panel
TRAINED, UNTRAINED = "trained", "untrained"
STREAM = (
    "Rows of the stream are divided by their root mean square, as the norms that read it do; sizes say nothing here."
)
SHARES = ("pc1", "pc1_2", "between")


@dataclass(frozen=True, eq=False)
class GroupReport:
    """Tables, one subject each.

    Attributes:
        curves: network, site, keys ("new", "repeated", "all"), group (the value), axis_1, axis_2 (the mean's place in the
            plane of its own network and site), episodes, rows.
        points: network, site, keys, group, axis_1, axis_2 of at most 1,500 keys a panel.
        shares: network, site, and pc1, pc1_2 (of the group means' variance), between (share of the groups in the variance
            of the keys), each with `_null`, `_edge` (mean and 97.5 % point with labels permuted inside positions) and `_p`.
        order: network, site (layers, then heads), and the columns of `held_out.order`.
        verdict: model, site and what the rule found; empty where it does not apply.
        cuts: what cutting the first axis of each layer costs (`axis_cut.Cut`); empty where it was not asked for.
        words: what was found, what was left out, and what it cannot say.
    """

    curves: pd.DataFrame
    points: pd.DataFrame
    shares: pd.DataFrame
    order: pd.DataFrame
    verdict: pd.DataFrame
    cuts: pd.DataFrame
    words: tuple[str, ...]
    record: dict[str, Any] = field(default_factory=dict)

    @property
    def frames(self) -> dict[str, pd.DataFrame]:
        """The tables that hold something."""
        named = {"shares": self.shares, "order": self.order, "verdict": self.verdict, "cuts": self.cuts}
        return {
            name: frame
            for name, frame in (named | {"curves": self.curves, "points": self.points}).items()
            if len(frame)
        }


@dataclass(frozen=True, eq=False)
class _Read:
    """One network on the episodes: rows (N,d) of layers and heads at the marked places."""

    marks: Marks
    layers: Mapping[str, Array]
    heads: Mapping[str, Array]


def tunnel_groups(
    name: str,
    group: Group = "count",
    keys: Kept | None = None,
    where: Where = "value",
    *,
    beside: Sequence[str] = (),
    layers: Sequence[int] | None = None,
    episodes: int = EPISODES,
    draws: int = DRAWS,
    seed: int = 0,
    rule: bool = True,
    cut: bool = False,
    progress: Note | None = None,
) -> GroupReport:
    """A shipped tunnel model (or the folder of a run) on fresh episodes.

    Args:
        keys: which keys are grouped; new ones where the task repeats keys, else all.
        beside: folders of runs of the same task with other seeds: the verdict is over all of them.
        layers: only these. rule: also the verdict.
        cut: also cut the first axis of each layer's values or outputs, on the half of the episodes it was not fitted on.

    Raises:
        BadRequest: for a group that the task does not define, a layer that is not there, a run of another task.
        BadInput: for too few episodes. TunnelError: for a name that holds no tunnel model.
    """
    tunnel, model, card = load_tunnel(name)
    drawn = tunnel.sample(episodes, torch.Generator().manual_seed(seed))
    marks = marks_of(tunnel, drawn.tokens)
    chosen: Kept = keys or ("new" if marks.repeated.any() else "all")
    kept(marks, chosen, name)  # refusals first: a forward pass is dear
    grouped(marks.where(kept(marks, chosen, name)), group, name)
    whole, done = 2 + len(beside), [0]

    def read(network: nn.Module, note: str) -> _Read:
        seen = collect(network, episode_batches(drawn, 32), where, "all")
        done[0] += 1
        if progress is not None:
            progress(done[0], whole, note)
        by_layer = _only(seen.by("layer"), layers, name)
        rows = {site: marks.of(part) for site, part in by_layer.items()}
        if where == "residual":
            rows = {site: unit(part) for site, part in rows.items()}
        heads = {site: marks.of(part) for site, part in seen.by("head").items()} if where != "residual" else {}
        return _Read(marks, rows, {site: part for site, part in heads.items() if _layer(site) in by_layer})

    networks = {TRAINED: read(model, name), UNTRAINED: read(untrained_like(card).eval(), "untrained")}
    found = _report(networks, group, chosen, name, draws=draws, seed=seed)
    runs = [(name, networks[TRAINED])]
    for folder in beside:
        task, other, its = load_tunnel(folder)
        if its["tunnel"] != card["tunnel"]:
            raise BadRequest(f"{folder} was trained on {its['tunnel']}, not on {card['tunnel']}.")
        del task
        runs.append((folder, read(other, folder)))
    told: list[tuple[str, str, Placed]] = []
    words = []
    for site in networks[TRAINED].layers if rule else ():
        here = [(run, _placed(its_read, site, seed, draws)) for run, its_read in runs if site in its_read.layers]
        told += [(run, site, one) for run, one in here]
        told.append((UNTRAINED, site, _placed(networks[UNTRAINED], site, seed, draws)))
        words.append(f"{site}: {over_seeds([one for _, one in here])[1]}")
    record = {"model": name, "episodes": episodes, "seed": seed, "runs": [run for run, _ in runs], "vectors": where}
    record["entropy"] = "exact predictive entropy of the task, bits"
    extra: tuple[str, ...] = (
        "Inside a position the count is the position less the repeats, so that a count of symbols and a count of repeats "
        "are told apart across positions only.",
    )
    if not marks.repeated.any():
        extra = ()
    if where == "residual":
        extra = (*extra, STREAM)
    return replace(
        found,
        order=_with_runs(found.order, runs, group, chosen, draws, seed),
        verdict=verdict_table(told) if told else pd.DataFrame(),
        cuts=_cuts(model, drawn, networks[TRAINED], group, chosen, where, name, seed) if cut else pd.DataFrame(),
        words=(*(f"Repeated keys, {word}" if marks.repeated.any() else word for word in words), *found.words, *extra),
        record=found.record | record,
    )


def prompt_groups(
    model: nn.Module,
    prompts: Prompts,
    group: Group = "entropy",
    where: Where = "value",
    *,
    name: str,
    layers: Sequence[int] | None = None,
    draws: int = DRAWS,
    seed: int = 0,
) -> GroupReport:
    """A causal language model at the last token of every prompt, in bins of its own predictive entropy.

    Raises:
        BadRequest: for another group than entropy, or a layer that is not there. BadInput: for too few prompts.
    """
    if group != "entropy":
        raise BadRequest(f"The prompts of a pretrained model define no {group}; choose --group entropy.")
    networks: dict[str, _Read] = {}
    note, entropy = "", np.zeros(0)
    for who, network in ((TRAINED, model), (UNTRAINED, fresh(model, seed))):
        seen = collect(network, prompts.batches(), where)
        rows: dict[str, Array] = {}
        for site, part in _only(seen.by("layer"), layers, name).items():
            vectors, keep, note = residualised(unit(part[:, 0]) if where == "residual" else part[:, 0], prompts.last)
            rows[site] = vectors
        if who == TRAINED:  # the fresh network is read against it too: its own is that of a uniform row
            entropy = seen.entropy[keep, 0]
        networks[who] = _Read(one_position(entropy), rows, {})
    bins = max(1, min(10, len(entropy) // FEWEST))
    found = _report(networks, group, "all", name, draws=draws, seed=seed, bins=bins, levels=0)
    record = {"model": name, "prompts": len(prompts.ids), "left_out": prompts.short, "last_token": note, "seed": seed}
    record |= {"vectors": where, "entropy": "the model's own next-token entropy, bits"}
    words = (*found.words, f"Last tokens: {note}.", "No verdict: nothing is asked twice, so entropy stands alone.")
    return replace(found, words=words, record=found.record | record)


def _report(
    networks: Mapping[str, _Read],
    group: Group,
    keys: Kept,
    name: str,
    *,
    draws: int,
    seed: int,
    **bins: int,
) -> GroupReport:
    curves, points, lines, tables, words = [], [], [], [], []
    for who, read in networks.items():
        chosen = kept(read.marks, keys, name) if keys != "all" else np.ones(len(read.marks), dtype=bool)
        ratios = {}
        for site, rows in read.layers.items():
            stay, ratio = first_key(read.marks, rows)
            ratios[site] = ratio
            inner = chosen & stay
            marks = read.marks.where(inner)
            groups = grouped(marks, group, name, **bins)
            basis = curve(rows[inner], groups.number, len(groups.values))
            line: dict[str, Any] = {"network": who, "site": site}
            found = shares(rows[inner], marks, groups, np.random.default_rng(seed), draws)
            for place, column in enumerate(SHARES):
                line |= {column: found.value[place], f"{column}_null": found.null[place]}
                line |= {f"{column}_edge": found.edge[place], f"{column}_p": found.p[place]}
            lines.append(line)
            parts: dict[str, tuple[Marks, Groups, Array]] = {keys: (marks, groups, rows[inner])}
            if keys == "new" and read.marks.repeated.any():
                again = read.marks.where(read.marks.repeated & stay)
                by: Group = "position" if group == "position" else "count"
                parts["repeated"] = (again, grouped(again, by, name), rows[read.marks.repeated & stay])
            for kind, (its, its_groups, its_rows) in parts.items():
                curves.append(_means(who, site, kind, basis, its, its_groups, its_rows))
                points.append(_points(who, site, kind, basis, its_groups, its_rows, seed))
        stay, _ = first_key(read.marks, next(iter(read.layers.values())))
        marks = read.marks.where(chosen & stay)
        groups = grouped(marks, group, name, **bins)
        sites = {site: rows[chosen & stay] for site, rows in (read.layers | read.heads).items()}  # type: ignore[operator]
        tables.append(orders(sites, marks, groups, seed=seed, draws=draws).assign(network=who))
        if who == TRAINED:
            words += list(groups.left_out)
            known = {site: ratio for site, ratio in ratios.items() if ratio == ratio}
            if known:
                far = ", ".join(f"{site} {ratio:.1f}" for site, ratio in known.items())
                words.append(
                    "The first key, which sees only itself, is left out; its mean lies so many times as far out as the "
                    f"furthest other position: {far}."
                )
    order = pd.concat(tables, ignore_index=True)
    order = order[["network", *[column for column in order.columns if column != "network"]]]
    record = {"group": group, "keys": keys, "draws": draws}
    return GroupReport(
        pd.concat(curves, ignore_index=True),
        pd.concat(points, ignore_index=True),
        pd.DataFrame(lines),
        order,
        pd.DataFrame(),
        pd.DataFrame(),
        tuple(words),
        record,
    )


def _placed(read: _Read, site: str, seed: int, draws: int) -> Placed:
    stay, _ = first_key(read.marks, read.layers[site])
    return placed(read.layers[site][stay], read.marks.where(stay), seed=seed, draws=draws)


def _cuts(
    model: nn.Module, drawn: Episodes, read: _Read, group: Group, keys: Kept, where: Where, name: str, seed: int
) -> pd.DataFrame:
    """The first axis of every layer, fitted on one half of the episodes and cut on the other."""
    from ..interventions.axis_cut import cut_axis, table

    if where not in ("value", "output"):
        raise BadRequest(f"An axis of values or outputs can be cut, not of the {where}.")
    fitted = halves(read.marks, seed)
    held = np.unique(read.marks.sequence[~fitted])
    found = []
    for site, rows in read.layers.items():
        stay, _ = first_key(read.marks, rows)
        inner = kept(read.marks, keys, name) & stay & fitted
        groups = grouped(read.marks.where(inner), group, name)
        axis = curve(rows[inner], groups.number, len(groups.values)).axes[0]
        found.append(cut_axis(model, drawn, held, rows[fitted], axis, int(site[1:]), place=where, seed=seed))
    return table(found)


def _with_runs(
    order: pd.DataFrame, runs: Sequence[tuple[str, _Read]], group: Group, keys: Kept, draws: int, seed: int
) -> pd.DataFrame:
    """The table with the same figures of the other runs' layers."""
    tables = [order]
    for name, read in runs[1:]:
        stay, _ = first_key(read.marks, next(iter(read.layers.values())))
        inner = kept(read.marks, keys, name) & stay if keys != "all" else stay
        marks = read.marks.where(inner)
        sites = {site: rows[inner] for site, rows in read.layers.items()}
        tables.append(orders(sites, marks, grouped(marks, group, name), seed=seed, draws=draws).assign(network=name))
    return pd.concat(tables, ignore_index=True)


def _means(
    who: str, site: str, kind: str, basis: GroupCurve, marks: Marks, groups: Groups, rows: Array
) -> pd.DataFrame:
    lines = []
    for number, value in enumerate(groups.values):
        mine = groups.number == number
        place = basis.project(rows[mine].mean(0)[None])[0]
        line = {"network": who, "site": site, "keys": kind, "group": value, "axis_1": place[0], "axis_2": place[1]}
        lines.append(line | {"episodes": len(np.unique(marks.sequence[mine])), "rows": int(mine.sum())})
    return pd.DataFrame(lines)


def _points(who: str, site: str, kind: str, basis: GroupCurve, groups: Groups, rows: Array, seed: int) -> pd.DataFrame:
    inside = np.flatnonzero(groups.number >= 0)
    some = np.sort(np.random.default_rng(seed).permutation(inside)[:POINTS])
    place = basis.project(rows[some])
    table = {"group": groups.values[groups.number[some]], "axis_1": place[:, 0], "axis_2": place[:, 1]}
    return pd.DataFrame(table).assign(network=who, site=site, keys=kind)


def _layer(site: str) -> str:
    """ "L1" of "L1H0", "L1KV2" or "L1"."""
    return site.split("KV")[0].split("H")[0].split(" ")[0]


def _only(found: dict[str, Array], layers: Sequence[int] | None, name: str) -> dict[str, Array]:
    if not layers:
        return found
    missing = [number for number in layers if f"L{number}" not in found]
    if missing:
        raise BadRequest(f"{name} has layers 0 … {len(found) - 1}; there is no {missing[0]}.")
    return {site: rows for site, rows in found.items() if site in {f"L{number}" for number in layers}}
