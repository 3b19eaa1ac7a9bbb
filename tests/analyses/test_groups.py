"""Groups of keys, their curve and the verdict: closed forms, brute force, and planted data whose answer is known."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from advantage_probe.analyses.manifolds.group_curve import curve, shares
from advantage_probe.analyses.manifolds.groups import Groups, Marks, first_key, grouped, kept, marks_of, one_position
from advantage_probe.analyses.manifolds.held_out import halves, order
from advantage_probe.analyses.manifolds.verdict import Placed, over_seeds, placed
from advantage_probe.analyses.wind_tunnels.tasks.bijection import Bijection
from advantage_probe.analyses.wind_tunnels.tasks.registry import tunnel
from advantage_probe.hooks.errors import BadInput, BadRequest

TASK = Bijection(symbols=12, pairs=18, repeats=0.5)


def marks(episodes: int = 300, seed: int = 0, task: Bijection = TASK) -> Marks:
    """All keys but the first, of fresh episodes."""
    found = marks_of(task, task.sample(episodes, torch.Generator().manual_seed(seed)).tokens)
    return found.where(found.position > 0)


def curved(numbers: np.ndarray, seed: int = 0, width: int = 24, noise: float = 1.0) -> np.ndarray:
    """Vectors (N,24) on a parabola along two random directions, with noise of unit size."""
    generator = np.random.default_rng(seed)
    axes = np.linalg.qr(generator.normal(size=(width, 2)))[0]
    place = np.stack([numbers, 0.1 * (numbers - numbers.mean()) ** 2], 1)
    return place @ axes.T + noise * generator.normal(size=(len(numbers), width))


def test_counts_and_repeats_are_those_of_a_walk_through_the_tokens() -> None:
    tokens = TASK.sample(20, torch.Generator().manual_seed(3)).tokens
    found = marks_of(TASK, tokens)
    place = 0
    for episode, row in enumerate(tokens.tolist()):
        shown: list[int] = []
        for position in range(0, len(row), 2):
            again = row[position] in shown
            assert (found.sequence[place], found.position[place]) == (episode, position)
            assert found.repeated[place] == again
            assert found.count[place] == len(set(shown))
            assert found.entropy[place] == pytest.approx(0.0 if again else np.log2(12 - len(set(shown))))
            shown.append(row[position])
            place += 1
    assert place == len(found)


def test_a_count_goes_with_one_entropy_among_new_keys_and_with_two_among_all() -> None:
    found = marks()
    new = found.where(~found.repeated)
    by_count, by_entropy = grouped(new, "count", "t"), grouped(new, "entropy", "t")
    assert len(by_count.values) == len(by_entropy.values)
    assert np.array_equal(by_count.number.argsort(kind="stable"), (-by_entropy.number).argsort(kind="stable"))
    assert grouped(found, "entropy", "t").values[0] == 0.0


def test_many_values_are_put_into_bins_of_equal_size() -> None:
    entropy = np.random.default_rng(0).exponential(size=600)
    found = grouped(one_position(entropy), "entropy", "m", bins=10)
    assert np.bincount(found.number).tolist() == [60] * 10
    assert found.values[3] == pytest.approx(np.sort(entropy)[180:240].mean())


def test_what_a_task_does_not_define_is_refused_in_one_sentence() -> None:
    other = tunnel("mess3")
    there = marks_of(other, other.sample(20, torch.Generator().manual_seed(0)).tokens)
    with pytest.raises(BadRequest, match="counts no used symbols"):
        grouped(there, "count", "mess3")
    with pytest.raises(BadRequest, match="no keys that come again"):
        kept(there, "new", "mess3")
    with pytest.raises(BadRequest, match="read at one position"):
        grouped(one_position(np.arange(40.0)), "position", "m")
    distinct = Bijection(symbols=20, pairs=19)
    with pytest.raises(BadRequest, match="repeats no key"):
        kept(marks(20, task=distinct), "repeated", "bijection-distinct")
    with pytest.raises(BadInput, match="rows of 12 episodes"):
        grouped(marks(10), "count", "t")


def test_a_group_of_few_episodes_is_left_out_and_said() -> None:
    found = marks(40)
    new = found.where(~found.repeated)
    groups = grouped(new, "count", "t")
    small = [d for d in range(1, 12) if 0 < len(np.unique(new.sequence[new.count == d])) < 12]
    assert small
    assert str(len(small)) in groups.left_out[0]
    assert not set(small) & set(groups.values.astype(int))
    assert (groups.number[np.isin(new.count, small)] == -1).all()


def test_the_curve_is_the_singular_value_decomposition_of_its_means() -> None:
    found = marks()
    rows = curved(found.count.astype(float))
    groups = grouped(found, "count", "t")
    made = curve(rows, groups.number, len(groups.values))
    inside = groups.number >= 0
    means = np.stack([rows[groups.number == one].mean(0) for one in range(len(groups.values))])
    values = np.linalg.eigvalsh(np.cov(means.T, bias=True))[::-1]
    assert np.allclose(made.means, means)
    assert made.shares == pytest.approx([values[0] / values.sum(), values[:2].sum() / values.sum()])
    centred = rows[inside] - rows[inside].mean(0)
    left = sum(((rows[groups.number == one] - means[one]) ** 2).sum() for one in range(len(means)))
    assert made.between == pytest.approx(1 - left / (centred**2).sum())
    along = made.project(means)[:, 0]
    assert along[-1] > along[0]


def test_a_planted_curve_is_found_and_a_shuffled_one_is_not() -> None:
    found = marks()
    new = found.where(~found.repeated)
    groups = grouped(new, "count", "t")
    rows = curved(new.count.astype(float))
    generator = np.random.default_rng(1)
    there = order(rows, new, groups, halves(new), generator, 60)
    assert there["r"] > 0.5 > there["null_edge"]
    assert there["p"] == pytest.approx(1 / 61)
    assert shares(rows, new, groups, generator, 60).p[2] == pytest.approx(1 / 61)
    mixed = rows[generator.permutation(len(rows))]
    gone = order(mixed, new, groups, halves(new), generator, 60)
    assert abs(gone["r"]) < 0.2
    assert shares(mixed, new, groups, generator, 60).p[2] > 0.02


def test_vectors_that_know_their_position_alone_have_a_first_axis_and_no_order() -> None:
    """PC1 of group means is no evidence: position alone gives it 90 %, with permuted labels as with the true ones."""
    found = marks()
    new = found.where(~found.repeated)
    groups = grouped(new, "count", "t")
    rows = curved(new.position / 2.0, noise=0.3)
    generator = np.random.default_rng(2)
    share = shares(rows, new, groups, generator, 60)
    assert share.value[0] > 0.9 < share.null[0]
    assert abs(order(rows, new, groups, halves(new), generator, 60)["r"]) < 0.15


def test_the_held_out_correlation_is_spearmans_inside_positions() -> None:
    found = marks(120)
    new = found.where(~found.repeated)
    groups = grouped(new, "count", "t")
    rows = curved(new.count.astype(float), noise=2.0)
    fitted = halves(new)
    made = curve(rows[fitted], groups.number[fitted], len(groups.values))
    held = ~fitted & (groups.number >= 0)
    along = made.project(rows)[:, 0] * -1  # entropy falls as the count rises
    each, size = [], []
    for position in np.unique(new.position[held]):
        here = held & (new.position == position)
        if here.sum() >= 8 and len(np.unique(new.entropy[here])) > 1:
            each.append(spearmanr(along[here], new.entropy[here])[0])
            size.append(here.sum())
    measured = order(rows, new, groups, fitted, np.random.default_rng(0), 20)
    assert measured["r"] == pytest.approx(np.average(each, weights=size), abs=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_planted_counts_and_planted_entropies_get_their_verdicts(seed: int) -> None:
    found = marks(seed=seed)
    count = placed(curved(found.count.astype(float), seed), found, seed=seed)
    assert count.word == "count"
    assert count.plain.place == pytest.approx(1.0, abs=0.15)
    assert count.inside.place == pytest.approx(1.0, abs=0.3)
    end = np.where(found.repeated, 11.0, found.count)  # repeated keys at the low-entropy end
    entropy = placed(curved(end, seed), found, seed=seed)
    assert entropy.word == "entropy"
    assert entropy.plain.place == pytest.approx(-1.0, abs=0.2)


def test_what_is_no_curve_and_what_is_position_get_no_verdict() -> None:
    said = []
    for seed in range(12):
        found = marks(150, seed)
        said.append(placed(np.random.default_rng(seed).normal(size=(len(found), 24)), found, seed=seed).word)
        position = placed(curved(found.position / 2.0, seed), found, seed=seed)
        assert position.plain.low > 0  # the plain rule alone would call this a count
        said.append(position.word)
    assert said.count("cannot tell") >= 23


def test_the_end_of_the_curve_does_not_pull_noise_towards_a_count() -> None:
    """Without two independent fits the difference of pure noise is positive in every draw; with them its mean is 0."""
    plain, naive = [], []
    for seed in range(30):
        found = marks(100, seed)
        rows = np.random.default_rng(seed).normal(size=(len(found), 24))
        plain.append(placed(rows, found, seed=seed, draws=5).plain.difference)
        new = ~found.repeated
        known = [d for d in range(1, 12) if (new & (found.count == d)).sum() >= 12]
        means = {d: rows[new & (found.count == d)].mean(0) for d in known}
        held = found.repeated & np.isin(found.count, known[:-1])
        near = np.stack([means[d] for d in found.count[held]])
        naive.append((((rows[held] - means[known[-1]]) ** 2).sum(1) - ((rows[held] - near) ** 2).sum(1)).mean())
    assert min(naive) > 0
    assert abs(np.mean(plain)) < 3 * np.std(plain) / np.sqrt(len(plain))
    assert np.mean(naive) > 5 * abs(np.mean(plain))


def test_distinct_keys_cannot_tell_by_construction() -> None:
    distinct = Bijection(symbols=20, pairs=19)
    found = marks(40, task=distinct)
    answer = placed(curved(found.count.astype(float)), found)
    assert answer.word == "cannot tell"
    word, why = over_seeds([answer])
    assert word == "cannot tell"
    assert "by construction" in why
    entropy = grouped(found, "entropy", "t")
    measured = order(curved(found.count.astype(float)), found, entropy, halves(found), np.random.default_rng(0), 20)
    assert np.isnan(measured["r"])


def test_four_of_five_seeds_decide_and_three_do_not() -> None:
    found = [marks(seed=seed) for seed in range(2)]
    yes: Placed = placed(curved(found[0].count.astype(float)), found[0])
    no: Placed = placed(np.random.default_rng(0).normal(size=(len(found[1]), 24)), found[1])
    assert over_seeds([yes] * 4 + [no])[0] == "count"
    assert over_seeds([yes] * 3 + [no] * 2)[0] == "cannot tell"
    word, why = over_seeds([yes])
    assert word == "cannot tell"
    assert "4 of 5" in why


def test_the_first_key_is_left_out_and_its_distance_said() -> None:
    whole = marks_of(TASK, TASK.sample(60, torch.Generator().manual_seed(0)).tokens)
    rows = np.random.default_rng(0).normal(size=(len(whole), 5)) * 0.01
    rows[:, 0] += whole.position / 34
    rows[whole.position == 0, 1] += 6.0
    stay, ratio = first_key(whole, rows)
    assert np.array_equal(stay, whole.position > 0)
    assert ratio == pytest.approx(np.hypot(6.0, 18 / 34) / (16 / 34), rel=0.02)
    assert first_key(one_position(np.arange(30.0)), rows[:30])[0].all()


def test_rows_without_a_group_count_for_nothing() -> None:
    rows = np.random.default_rng(0).normal(size=(60, 4))
    number = np.repeat([0, 1, 2, -1], 15)
    assert np.allclose(curve(rows, number, 3).means, curve(rows[:45], number[:45], 3).means)
    groups = Groups(number, np.arange(3.0))
    assert len(groups.without(1, "why").values) == 2
    assert groups.without(1, "why").number.tolist() == [0] * 15 + [-1] * 15 + [1] * 15 + [-1] * 15


def test_the_stages_of_the_stream_are_the_hidden_states_of_the_library() -> None:
    from advantage_probe.analyses.manifolds.stages import stages, unit
    from advantage_probe.analyses.wind_tunnels.truth.against_truth import batches
    from advantage_probe.analyses.wind_tunnels.truth.shipped import load

    for name in ("bijection-repeats", "mess3"):  # a Llama and a GPT-2
        task, model, _ = load(name)
        drawn = task.sample(6, torch.Generator().manual_seed(0))
        found = stages(model, batches(drawn, 4))
        with torch.no_grad():
            hidden = model(input_ids=drawn.tokens, output_hidden_states=True).hidden_states
        assert np.abs(found["L0 after feed-forward"] - hidden[1].double().numpy()).max() < 1e-5
        with torch.no_grad():
            last = model.get_output_embeddings()(_last_norm(model)(torch.tensor(found[list(found)[-1]]).float()))
            own = model(input_ids=drawn.tokens).logits
        assert (last - own).abs().max() < 1e-3
        assert (unit(found["L0 after attention"]) ** 2).mean(-1) == pytest.approx(1.0)


def _last_norm(model: torch.nn.Module) -> torch.nn.Module:
    return model.model.norm if hasattr(model, "model") else model.transformer.ln_f
