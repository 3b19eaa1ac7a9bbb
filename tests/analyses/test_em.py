"""EM against SGD: the draws are the released ones, the M-step is a bound's minimum, arms are what they say."""

from __future__ import annotations

import pytest
import torch
from scipy import stats
from torch import Tensor

from advantage_probe.analyses.em import arms as em_arms
from advantage_probe.analyses.em import chain as em_chain
from advantage_probe.analyses.em import experiment as em
from advantage_probe.analyses.em import m_step as em_step

SHORT = (42, 2024)


def small(seeds: tuple[int, ...] = SHORT, positions: int = 60) -> em_chain.Sequences:
    return em_chain.draw(seeds, positions)


def rebuilt(weights: em_chain.Weights, data: em_chain.Sequences, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Loss summed over targets, α and o in float64, by full T × T tensors."""
    inputs, positions = data.inputs.double(), data.targets.shape[-1]
    scores = (inputs @ weights.query.double()) @ (inputs @ weights.key.double()).mT / em_chain.KEYS**0.5
    scores = scores.masked_fill(~torch.ones(positions, positions).tril().bool(), -torch.inf)
    attention = scores.softmax(-1)
    read = attention @ value
    rows = (read @ weights.output.double()).log_softmax(-1)
    return -rows.gather(-1, data.targets[..., None]).sum((-2, -1)), attention, read


def larger(seeds: tuple[int, ...] = SHORT, factor: float = 10.0) -> em_chain.Weights:
    """Weights at which responsibilities are far from uniform."""
    return em_chain.Weights(*(matrix * factor for matrix in em_chain.first_weights(seeds).all))


# -- what is drawn -----------------------------------------------------------------------------------------------------


def test_the_draws_are_those_whose_exact_filter_losses_were_released() -> None:
    losses = em_chain.draw(em_chain.SEEDS).filter_loss.tolist()
    assert [round(loss, 4) for loss in losses] == [1.8412, 1.8089, 1.8202, 1.8498, 1.8278]


def test_the_oracle_is_the_entropy_of_the_released_row() -> None:
    row = [0.3498, 0.1660, 0.0830, 0.0553, 0.0415, 0.0553, 0.0830, 0.1660]
    assert em_chain.oracle_entropy() == pytest.approx(stats.entropy(row), abs=2e-4)
    assert round(em_chain.oracle_entropy(), 4) == 1.8292


def test_drawing_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    em_chain.draw((1,), 5)
    em_chain.first_weights((1,))
    assert torch.equal(before, torch.get_rng_state())


# -- the fused pass ----------------------------------------------------------------------------------------------------


def test_one_backward_gives_the_value_gradients_and_the_usage_that_full_tensors_give() -> None:
    weights, data = larger(factor=3), small()
    value = (data.inputs.double() @ weights.value.double()).requires_grad_()
    summed, attention, read = rebuilt(weights, data, value)
    (exact,) = torch.autograd.grad(summed.sum(), value, retain_graph=True)
    (upstream,) = torch.autograd.grad(summed.sum(), read)
    loss, gradient, usage = em_arms.responsibilities(weights, data)
    torch.testing.assert_close(attention.mT @ upstream, exact, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(gradient.double(), exact, rtol=2e-4, atol=2e-5)
    torch.testing.assert_close(usage.double(), attention.sum(-2), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(loss.double(), summed.detach() / 60, rtol=1e-5, atol=1e-6)


def test_gradients_of_all_four_matrices_equal_those_of_full_tensors() -> None:
    data, started = small(), larger(factor=3)
    matrices = [matrix.clone().requires_grad_() for matrix in started.all]
    fused = em_arms.losses(em_arms.forward(em_chain.Weights(*matrices), data.inputs)[0], data.targets)
    found = torch.autograd.grad(fused.sum(), matrices)
    exact = [matrix.double().requires_grad_() for matrix in started.all]
    plain = em_chain.Weights(*exact)
    summed, _, _ = rebuilt(plain, data, data.inputs.double() @ plain.value)
    for one, other in zip(found, torch.autograd.grad(summed.sum() / 60, exact), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-3, atol=1e-6)


# -- the M-step --------------------------------------------------------------------------------------------------------


def prepared() -> tuple[em_chain.Weights, em_chain.Sequences, Tensor, Tensor, Tensor, Tensor]:
    """Weights, data, values, m, N and M in float64 at a point with sharp responsibilities."""
    weights, data = larger(), small()
    value = (data.inputs.double() @ weights.value.double()).requires_grad_()
    summed, attention, _ = rebuilt(weights, data, value)
    (gradient,) = torch.autograd.grad(summed.sum(), value)
    return weights, data, value.detach(), gradient, attention.sum(-2).detach(), em_step.curvature(weights.output)


def test_the_bound_holds_at_random_changes_of_free_values() -> None:
    weights, data, value, gradient, usage, curved = prepared()
    before, _, _ = rebuilt(weights, data, value)
    generator = torch.Generator().manual_seed(0)
    tight = 0.0
    for trial in range(200):
        size = 10.0 ** (trial % 5 - 3)
        change = size * torch.randn(value.shape, generator=generator, dtype=torch.float64)
        risen = rebuilt(weights, data, value + change)[0] - before
        allowed = em_step.majorised(change, gradient, usage, curved)
        assert (risen <= allowed + 1e-9 * before).all()
        tight = max(tight, float(((risen - (gradient * change).sum((-2, -1))) / allowed.abs()).max()))
    assert tight > 1e-3  # a bound that is nowhere near would prove nothing


def test_half_the_curvature_is_no_bound() -> None:
    # one row and two outcomes with equal odds: there log-sum-exp has exactly the curvature ¼ (1, −1)(1, −1)ᵀ of B
    output = torch.eye(2, dtype=torch.float64)[None]
    change = torch.tensor([[[0.1, -0.1]]], dtype=torch.float64)
    gradient = torch.tensor([[[-0.5, 0.5]]], dtype=torch.float64)
    usage = torch.ones(1, 1)
    risen = -(change[0, 0]).log_softmax(-1)[0] + torch.zeros(2).double().log_softmax(-1)[0]
    full = em_step.majorised(change, gradient, usage, em_step.curvature(output))
    half = em_step.majorised(change, gradient, usage, em_step.curvature(output) / 2)
    assert float(half) < float(risen) <= float(full)
    assert float(full) == pytest.approx(float(risen), rel=1e-3)


def test_the_free_step_is_the_minimum_of_the_bound() -> None:
    _, _, _, gradient, usage, curved = prepared()
    change = em_step.free_step(gradient, usage, curved).requires_grad_()
    lowest = em_step.majorised(change, gradient, usage, curved)
    (slope,) = torch.autograd.grad(lowest.sum(), change)
    assert slope.abs().max() < 1e-5 * gradient.abs().max()
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        other = change + 0.1 * torch.randn(change.shape, generator=generator, dtype=torch.float64)
        assert (em_step.majorised(other, gradient, usage, curved) > lowest).all()


def test_the_shared_step_is_the_minimum_of_the_bound_over_one_matrix() -> None:
    _, data, _, gradient, usage, curved = prepared()
    inputs = data.inputs.double()
    change = em_step.matrix_step(inputs, gradient, usage, curved).requires_grad_()
    lowest = em_step.majorised(inputs @ change, gradient, usage, curved)
    (slope,) = torch.autograd.grad(lowest.sum(), change)
    assert slope.abs().max() < 1e-4 * (inputs.mT @ gradient).abs().max()
    assert (lowest < 0).all()


@pytest.mark.parametrize("damping", [0.3, 1.0])
def test_the_m_step_never_raises_the_loss(damping: float) -> None:
    weights, data, value, gradient, usage, curved = prepared()
    inputs = data.inputs.double()
    matrix = weights.value.double()
    loss, _, _ = rebuilt(weights, data, inputs @ matrix)
    for _ in range(30):
        value = (inputs @ matrix).requires_grad_()
        (gradient,) = torch.autograd.grad(rebuilt(weights, data, value)[0].sum(), value)
        matrix = matrix + damping * em_step.matrix_step(inputs, gradient, usage, curved)
        after, _, _ = rebuilt(weights, data, inputs @ matrix)
        assert (after <= loss + 1e-9).all()
        loss = after
    free, _, _ = rebuilt(weights, data, value.detach() + em_step.free_step(gradient, usage, curved))
    assert (free <= rebuilt(weights, data, value.detach())[0]).all()


def test_on_a_gaussian_mixture_the_same_code_gives_the_textbook_means() -> None:
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(50, 3, generator=generator, dtype=torch.float64)
    means = torch.randn(4, 3, generator=generator, dtype=torch.float64).requires_grad_()
    held = (-0.5 * torch.cdist(points, means) ** 2).softmax(-1).detach()
    expected_loss = 0.5 * (held * torch.cdist(points, means) ** 2).sum()
    (gradient,) = torch.autograd.grad(expected_loss, means)
    usage = held.sum(0)
    textbook = (held[:, :, None] * points[:, None]).sum(0) / usage[:, None]
    found = means.detach() + em_step.free_step(gradient, usage, torch.eye(3).double())
    torch.testing.assert_close(found, textbook, rtol=1e-12, atol=1e-12)


def test_the_naive_update_has_no_unit_and_the_closed_form_has() -> None:
    _, _, _, gradient, usage, curved = prepared()
    naive = [-scale * gradient / usage[..., None] for scale in (1.0, 1 / 60)]
    assert float(naive[0].norm() / naive[1].norm()) == pytest.approx(60)
    # rescale the head's gauge: values × 7 and W_O / 7 are the same function, so the step must be the same step × 7
    own = em_step.free_step(gradient, usage, curved)
    other = em_step.free_step(gradient / 7, usage, curved / 49)
    torch.testing.assert_close(other, 7 * own, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(-gradient / 7 / usage[..., None], 7 * naive[0])
    # and a loss counted in another unit moves gradient and curvature together
    torch.testing.assert_close(em_step.free_step(3 * gradient, usage, 3 * curved), own, rtol=1e-9, atol=1e-9)


# -- the arms ----------------------------------------------------------------------------------------------------------


def arm(name: str) -> em_arms.Arm:
    return next(arm for arm in (*em_arms.ARMS, *em_arms.ADAM) if arm.name == name)


def test_sgd_and_its_faster_arms_are_torchs_own_sgd() -> None:
    data, fresh = small(), small(tuple(seed + em_chain.HELD_OUT for seed in SHORT))
    for name in ("sgd", "values_x10", "output_x10", "all_x10", "routing_frozen"):
        rates = arm(name).rates
        matrices = [matrix[:1].clone().requires_grad_() for matrix in em_chain.first_weights(SHORT).all]
        optimizer = torch.optim.SGD(
            [{"params": [m], "lr": 0.01 * rate} for m, rate in zip(matrices, rates, strict=True)]
        )
        one = em_chain.Sequences(data.inputs[:1], data.targets[:1], data.exact[:1])
        curve = []
        for _ in range(8):
            optimizer.zero_grad()
            weights = em_chain.Weights(*matrices)
            summed, _, _ = rebuilt(weights, one, one.inputs.double() @ weights.value.double())
            (summed.sum() / 60).backward()
            curve.append(float(summed.detach() / 60))
            optimizer.step()
        found = em_arms.train(arm(name), SHORT, data, fresh, 8)
        assert found.losses[0, :8].tolist() == pytest.approx(curve, abs=2e-6)


def test_a_seed_learns_the_same_whatever_shares_its_batch() -> None:
    data, fresh = small(), small(tuple(seed + em_chain.HELD_OUT for seed in SHORT))
    alone = [em_chain.Sequences(part.inputs[1:], part.targets[1:], part.exact[1:]) for part in (data, fresh)]
    for name in ("closed_form", "adam"):
        both = em_arms.train(arm(name), SHORT, data, fresh, 5)
        single = em_arms.train(arm(name), SHORT[1:], *alone, 5)
        torch.testing.assert_close(both.losses[1:], single.losses, rtol=1e-5, atol=1e-5)


def test_controls_go_as_far_as_what_they_control() -> None:
    data, fresh = small(), small(tuple(seed + em_chain.HELD_OUT for seed in SHORT))
    released = em_arms.train(arm("values_x10"), SHORT, data, fresh, 6)
    control = em_arms.train(arm("matched_length"), SHORT, data, fresh, 6, lengths=released.lengths)
    torch.testing.assert_close(control.lengths, released.lengths, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(control.losses[:, -1], released.losses[:, -1], rtol=1e-5)
    one, other = (em_arms.train(arm(name), SHORT, data, fresh, 1) for name in ("closed_form", "closed_form_length"))
    torch.testing.assert_close(one.lengths, other.lengths, rtol=1e-4, atol=1e-6)


def test_frozen_routing_stays_and_half_a_step_is_half() -> None:
    data, fresh = small(), small(tuple(seed + em_chain.HELD_OUT for seed in SHORT))
    whole = em_arms.train(arm("closed_form"), SHORT, data, fresh, 1)
    half = em_arms.train(arm("closed_form"), SHORT, data, fresh, 1, damping=0.5)
    first = em_chain.first_weights(SHORT).value
    torch.testing.assert_close(half.values[-1] - first, (whole.values[-1] - first) / 2, rtol=1e-4, atol=1e-6)


def test_two_processes_give_what_one_gives_and_pass_their_errors_on() -> None:
    data, fresh = small(), small(tuple(seed + em_chain.HELD_OUT for seed in SHORT))
    jobs = [em.Job((arm(name),), SHORT, 3, 1.0) for name in ("sgd", "all_x10")]
    told: list[tuple[int, int]] = []
    several = em._each(jobs, (data, fresh), 2, lambda done, whole, note: told.append((done, whole)))
    alone = em._each(jobs, (data, fresh), 1, None)
    assert told[-1] == (6, 6)
    found = {name: trained.losses for outcome in several for name, trained in outcome.trained.items()}
    for outcome in alone:
        for name, trained in outcome.trained.items():
            torch.testing.assert_close(found[name], trained.losses, rtol=0, atol=0)
    broken = em.Job((arm("matched_length"),), SHORT, 3, 1.0)  # follows an arm that is not there
    with pytest.raises(KeyError, match="values_x10"):
        em._each([broken], (data, fresh), 2, None)
