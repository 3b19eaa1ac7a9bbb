"""Columns against their definitions written out in loops; sums that merge; intervals that do not depend on the split."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import zoo
from truth import NAME, recorded, reference_registered

import advantage_probe as ap
from advantage_probe.probe import bootstrap
from advantage_probe.probe.columns import HEADS, SUMS
from advantage_probe.probe.law.definition import law
from advantage_probe.probe.state import State
from advantage_probe.probe.statistics import Sums


def captured(family: str, rows: int = 3):
    """Calls of a float64 model, with left padding where the family is a decoder."""
    with reference_registered():
        model = zoo.FAMILIES[family].build(attn_implementation=NAME).double()
        if family == "gpt_oss":
            model.set_experts_implementation("eager")
        batch = zoo.batch(family, rows=rows)
        if family != "t5":
            batch["attention_mask"] = torch.ones_like(batch["input_ids"])
            batch["attention_mask"][1, -2:] = 0
        with recorded(model) as recorder:
            model(**batch).loss.backward()
    return recorder.calls


def by_definition(call, head: int) -> dict[str, float]:
    """The columns of one head, in plain loops over counted rows and visible keys."""
    terms = law(call)
    batch, _, queries, keys = terms.attention.shape
    value = call.value[:, head // call.group].numpy()
    alpha, b = terms.attention[:, head].numpy(), terms.compatibility[:, head].numpy()
    u, o = call.upstream[:, head].numpy(), call.output[:, head].numpy()
    visible = terms.visible[:, head].numpy()
    rows = call.sequences.query_rows
    counted = np.ones((batch, queries), bool) if rows is None else rows.numpy()
    n = entropy = sink = first = distance = spread = missed = rho = pairs = pressure = edge = 0.0
    residual = scale = 0.0
    usage, uniform = np.zeros((batch, keys)), np.zeros((batch, keys))
    m, norms = np.zeros((batch, keys, value.shape[-1])), np.zeros((batch, keys))
    for s in range(batch):
        for i in range(queries):
            seen = [j for j in range(keys) if visible[s, i, j]]
            if not counted[s, i] or not seen:
                continue
            n += 1
            e = sum(alpha[s, i, j] * b[s, i, j] for j in seen)
            advantage = {j: e - b[s, i, j] for j in seen}
            entropy -= sum(alpha[s, i, j] * math.log(alpha[s, i, j]) for j in seen if alpha[s, i, j] > 0)
            sink += 1 - sum(alpha[s, i, j] for j in seen)
            first += alpha[s, i, 0] if 0 in seen else 0.0
            distance += sum(alpha[s, i, j] * abs(i - j) for j in seen)
            spread += sum(alpha[s, i, j] * advantage[j] ** 2 for j in seen)
            missed += max(advantage.values())
            pressure += sum((alpha[s, i, j] * (b[s, i, j] - e)) ** 2 for j in seen)
            edge += np.mean([b[s, i, j] for j in seen]) - e
            if len(seen) >= 3 and np.std([advantage[j] for j in seen]) > 0:
                rho += np.corrcoef([alpha[s, i, j] for j in seen], [advantage[j] for j in seen])[0, 1]
                pairs += 1
            residual += (e - float(u[s, i] @ o[s, i])) ** 2
            scale += sum(alpha[s, i, j] * b[s, i, j] ** 2 for j in seen)
            for j in seen:
                usage[s, j] += alpha[s, i, j]
                uniform[s, j] += 1 / len(seen)
                m[s, j] += alpha[s, i, j] * u[s, i]
                norms[s, j] += alpha[s, i, j] * np.linalg.norm(u[s, i])
    size = np.linalg.norm(m, axis=-1)
    length = np.linalg.norm(value, axis=-1)
    used = uniform > 0
    rows_of = counted.sum(1)

    def spread_over(mass: np.ndarray) -> float:
        total = 0.0
        for s in range(batch):
            share = mass[s] / mass[s].sum()
            total += rows_of[s] * -sum(p * math.log(p) for p in share if p > 0)
        return math.exp(total / n)

    turned = (size > 0) & (length > 0)
    cosine = sum(usage[s, j] * -(m[s, j] @ value[s, j]) / size[s, j] / length[s, j] for s, j in zip(*turned.nonzero()))
    squares = float((size**2).sum())
    return {
        "queries": n,
        "attention_entropy": entropy / n,
        "sink_share": sink / n,
        "effective_keys": math.exp(entropy / n),
        "first_key_share": first / n,
        "mean_distance": float("nan") if call.site.kind == "cross" else distance / n,
        "advantage_std": math.sqrt(spread / n),
        "advantage_missed": missed / n,
        "alignment": rho / pairs,
        "routing_pressure": math.sqrt(pressure / n),
        "content_pressure": math.sqrt(squares / n),
        "content_relative": math.sqrt(squares / n) * math.sqrt((length[used] ** 2).mean()),
        "score_slope": -pressure / n,
        "value_slope": -squares / n,
        "edge_over_uniform": edge / n,
        "usage_effective": spread_over(usage),
        "usage_uniform": spread_over(uniform),
        "coherence": float(size.sum() / norms.sum()),
        "update_cosine": float(cosine / usage[turned].sum()),
        "law_residual": math.sqrt(residual / scale),
    }


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_oss", "bert", "t5"])
def test_every_column_is_its_definition(family: str) -> None:
    calls = captured(family)
    state = State()
    for call in calls:
        state.add(call)
    from advantage_probe.probe import tables as frames

    table = frames.heads(state).set_index(["module", "head"])
    for call in calls:
        group_squares: dict[int, torch.Tensor] = {}
        for head in range(call.query.shape[1]):
            expected = by_definition(call, head)
            found = table.loc[(call.site.module, head)]
            for name, value in expected.items():
                if name == "law_residual":
                    assert found[name] < 1e-14
                else:
                    assert found[name] == pytest.approx(value, rel=1e-10, abs=1e-13, nan_ok=True), name
            m = law(call).value_gradient[:, head]
            rows = call.sequences.query_rows
            if rows is not None:  # only counted queries pull on a value
                terms = law(call)
                live = rows[:, :, None]
                m = (terms.weights[:, head] * live).transpose(1, 2) @ (call.upstream[:, head] * live)
            owner = head // call.group
            group_squares[owner] = group_squares.get(owner, 0) + m
        for head in range(call.query.shape[1]):
            rows = int(table.loc[(call.site.module, head)]["queries"])
            slope = -float(group_squares[head // call.group].square().sum()) / rows
            assert table.loc[(call.site.module, head)]["kv_value_slope"] == pytest.approx(slope, rel=1e-10)


def test_a_split_corpus_merges_to_the_whole_intervals_included() -> None:
    model = zoo.llama().double()
    ids = zoo.batch("llama", rows=14)["input_ids"]

    def loss(rows: torch.Tensor) -> torch.Tensor:
        logits = model(input_ids=rows).logits[:, :-1]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum")

    with ap.watch(model, detail="edges", edges=5) as whole:
        loss(ids).backward()
        whole.step(1.0)
    parts = []
    for rows in (ids[:1], ids[1:8], ids[8:]):
        with ap.watch(model, detail="edges", edges=5) as watch:
            loss(rows).backward()
            watch.step(1.0)
        parts.append(watch)
    parts[2].merge(parts[0])
    parts[2].merge(parts[1].state())
    one, other = whole.heads(intervals=True), parts[2].heads(intervals=True)
    assert one["routing_pressure_low"].notna().all()
    assert one["interval"].unique().tolist() == other["interval"].unique().tolist() == ["few: 14 sequences"]
    for name in one.select_dtypes("float64").columns:
        if not name.startswith("law_residual"):
            scale = one[name].abs().max()
            assert (one[name] - other[name]).abs().max() <= 1e-10 * (scale if scale > 0 else 1.0), name
    names = ["label", "direction", "query_position", "key_position"]
    assert whole.edges(5)[names].equals(parts[2].edges(5)[names])
    updates = whole.updates().select_dtypes("float64") - parts[2].updates().select_dtypes("float64")
    assert updates.abs().max().max() < 1e-10


def test_weights_are_poisson_and_the_same_everywhere() -> None:
    drawn = bootstrap.weights(list(range(2000))).numpy()
    assert drawn.shape == (bootstrap.REPLICATES, 2000)
    assert drawn.mean() == pytest.approx(1.0, abs=0.01)
    assert drawn.var() == pytest.approx(1.0, abs=0.02)
    assert (drawn == 0).mean() == pytest.approx(math.exp(-1), abs=0.005)
    assert np.array_equal(bootstrap.weights([7, 3]).numpy()[:, 1], bootstrap.weights([3]).numpy()[:, 0])
    # fixed for ever: a stored replicate must mean the same next year
    assert bootstrap.weights([12345]).numpy()[:10, 0].tolist() == [1, 2, 2, 0, 0, 2, 2, 0, 2, 1]


def test_intervals_have_the_width_that_theory_gives() -> None:
    count = 400
    generator = torch.Generator().manual_seed(0)
    sums = torch.zeros(count, 1, len(SUMS), dtype=torch.float64)
    names = list(SUMS)
    sums[..., names.index("queries")] = 1.0
    sums[..., names.index("entropy")] = torch.randn(count, 1, dtype=torch.float64, generator=generator) + 5
    state = Sums.empty(1)
    state.add(sums, list(range(count)))
    low, high = state.intervals()["attention_entropy"]
    values = sums[:, 0, names.index("entropy")]
    expected = 2 * 1.96 * float(values.std()) / math.sqrt(count)
    assert float(high[0] - low[0]) == pytest.approx(expected, rel=0.2)
    assert low[0] < float(values.mean()) < high[0]


@pytest.mark.parametrize(
    ("count", "said"), [(11, "none: 11 sequences, 12 are needed"), (12, "few: 12 sequences"), (30, "ok")]
)
def test_a_dozen_sequences_are_needed_for_an_interval_and_thirty_for_its_silence(count: int, said: str) -> None:
    generator = torch.Generator().manual_seed(0)
    sums = torch.rand(count, 2, len(SUMS), dtype=torch.float64, generator=generator) + 1
    sums[..., list(SUMS).index("hidden_queries")] = 0
    state = Sums.empty(2)
    for first in range(0, count, 5):
        state.add(sums[first : first + 5], list(range(first, min(first + 5, count))))
    assert bootstrap.told(len(state.sequences)) == said
    for low, high in state.intervals().values():
        assert np.isnan(low).all() == np.isnan(high).all() == (count < 12)


def test_sequences_are_counted_once_however_often_they_come() -> None:
    state, other = Sums.empty(1), Sums.empty(1)
    for _ in range(3):
        state.add(torch.ones(4, 1, len(SUMS), dtype=torch.float64), [1, 2, 3, 4])
    other.add(torch.ones(2, 1, len(SUMS), dtype=torch.float64), [4, 5])
    state.merge(other)
    assert len(state.sequences) == 5


@pytest.mark.parametrize("scale", ["plain", "log"])
def test_intervals_hold_the_truth_as_often_as_they_say(scale: str) -> None:
    """Ratios of two sums over 12 sequences: percentiles of the bootstrap held the truth in .91."""
    generator = np.random.default_rng(0)
    trials, count = 400, 12
    hits = 0
    for trial in range(trials):
        rows = generator.integers(20, 64, count).astype(float)
        totals = rows * (generator.gamma(4, 0.25, count) if scale == "log" else generator.normal(0.1, 0.5, count))
        weights = bootstrap.weights([trial * count + place for place in range(count)]).numpy()
        with np.errstate(invalid="ignore"):  # a replicate may be empty
            value, drawn = totals.sum() / rows.sum(), (weights @ totals) / (weights @ rows)
        low, high = bootstrap.interval(np.array([value]), drawn[:, None], count, scale=scale)
        hits += low[0] <= (1.0 if scale == "log" else 0.1) <= high[0]
    assert 0.92 <= hits / trials <= 0.98


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_numbers_do_not_depend_on_batch_size_once_the_loss_weight_is_told(reduction: str) -> None:
    model = zoo.llama().double()
    ids = zoo.batch("llama", rows=4)["input_ids"]
    tables = []
    for size in (4, 1):
        with ap.watch(model) as watch:
            for rows in ids.split(size):
                logits = model(input_ids=rows).logits[:, :-1]
                targets = rows[:, 1:].flatten()
                torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets, reduction=reduction).backward()
                watch.step(loss_weight=1.0 if reduction == "sum" else 1 / targets.numel())
        tables.append(watch.heads().select_dtypes("float64").drop(columns="law_residual"))
    assert ((tables[0] - tables[1]).abs() / tables[0].abs().max().clip(lower=1e-30)).max().max() < 1e-10


def test_no_column_grows_with_the_corpus() -> None:
    """The same text over and over is a corpus of any size; batches of any size and accumulation give its numbers."""
    model = zoo.llama().double()
    ids = zoo.batch("llama", rows=4)["input_ids"]
    tables = []
    for copies, size in ((1, 4), (2, 8), (4, 16), (8, 32), (8, 2), (3, 1)):
        with ap.watch(model) as watch:
            for rows in ids.repeat(copies, 1).split(size):
                logits = model(input_ids=rows).logits[:, :-1]
                targets = rows[:, 1:].flatten()
                watch.weigh(1 / targets.numel())
                torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets).backward()
                if size > 2:
                    watch.step()
            if size <= 2:  # all of them in one step
                watch.step()
        tables.append(watch.heads().set_index("label")[list(HEADS)].drop(columns=["queries", "law_residual"]))
    for table in tables[1:]:
        for name in table:
            np.testing.assert_allclose(table[name], tables[0][name], rtol=1e-6, atol=1e-12, err_msg=name)


def test_columns_that_compare_heads_do_not_see_the_gauge() -> None:
    model = zoo.gpt2().double()
    batch = zoo.batch("gpt2")
    with ap.watch(model) as before:
        model(**batch).loss.backward()
    with torch.no_grad():
        for block in model.transformer.h:
            width = block.attn.embed_dim
            block.attn.c_attn.weight[:, 2 * width :] *= 10
            block.attn.c_attn.bias[2 * width :] *= 10
            block.attn.c_proj.weight /= 10
    with ap.watch(model) as after:
        model(**batch).loss.backward()
    one, other = before.heads(), after.heads()
    free = [name for name in HEADS if name not in ("content_pressure", "value_slope", "kv_value_slope", "law_residual")]
    for name in free:
        scale = one[name].abs().max() or 1.0
        assert (one[name] - other[name]).abs().max() <= 1e-6 * scale, name
    assert (one["content_pressure"] / other["content_pressure"]).round(6).unique().tolist() == [10.0]


def test_a_non_finite_head_poisons_nothing_else() -> None:
    from dataclasses import replace

    calls = captured("llama")
    state, clean = State(), State()
    for call in calls:
        clean.add(call)
        upstream = call.upstream.clone()
        upstream[0, 1] = torch.inf
        state.add(replace(call, upstream=upstream))
        state.close_step()
        state.add(call)
        clean.add(call)
    from advantage_probe.probe import tables as frames

    table, expected = frames.heads(state), frames.heads(clean)
    hit = table["head"] == 1
    assert table.loc[hit, "status"].unique().tolist() == ["non-finite (1 step)"]
    assert (table.loc[~hit, "status"] == "ok").all()
    own = [name for name in HEADS if name != "kv_value_slope"]  # that one belongs to the whole group
    assert table.loc[~hit, own].equals(expected.loc[~hit, own])
    assert table.loc[hit, "routing_pressure"].notna().all()
