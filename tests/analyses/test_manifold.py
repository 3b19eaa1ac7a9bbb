"""Streaming PCA against scikit-learn and against float64 numpy on everything at once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA

from advantage_probe.analyses.vectors.pca import Manifold, StreamingPCA, pca
from advantage_probe.hooks.errors import BadInput, BadRequest, MergeRefused


def cloud(count: int = 600, width: int = 7, seed: int = 0, offset: float = 0.0) -> np.ndarray:
    generator = np.random.default_rng(seed)
    return generator.normal(size=(count, width)) @ generator.normal(size=(width, width)) + offset


def reference(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Variances and axes from a singular value decomposition of the centred rows, float64."""
    centred = rows.astype(np.float64) - rows.astype(np.float64).mean(0)
    _, size, axes = np.linalg.svd(centred, full_matrices=False)
    return size**2 / (len(rows) - 1), axes


def same(found: Manifold, rows: np.ndarray, tolerance: float = 1e-8) -> None:
    variances, axes = reference(rows)
    count = len(found.variances)
    assert np.abs(found.variances - variances[:count]).max() <= tolerance * variances[0]
    clear = ~found.ambiguous & (found.variances > 1e-6 * variances[0])
    assert np.abs(np.abs((found.axes * axes[:count]).sum(1))[clear] - 1).max() < 1e-8


def test_it_equals_scikit_learn() -> None:
    rows = cloud()
    found, other = pca(rows), PCA(svd_solver="full").fit(rows)
    assert np.abs(found.variances - other.explained_variance_).max() <= 1e-8 * other.explained_variance_[0]
    assert np.allclose(found.explained, other.explained_variance_ratio_, atol=1e-12)
    assert np.allclose(np.abs(found.project(rows)), np.abs(other.transform(rows)), atol=1e-9)
    square = (other.explained_variance_**2).sum()
    assert found.participation_ratio == pytest.approx(other.explained_variance_.sum() ** 2 / square)


@pytest.mark.parametrize("offset", [0.0, 1e3, 1e8])
def test_a_common_offset_costs_nothing(offset: float) -> None:
    rows = cloud(offset=offset)
    state = StreamingPCA(7)
    for part in np.array_split(rows, [1, 2, 3, 90, 90, 400]):
        state.update(part)
    same(state.finish(), rows)
    if offset == 1e8:  # what subtracting the outer product of the mean afterwards would have given
        naive = (rows.T @ rows - len(rows) * np.outer(rows.mean(0), rows.mean(0))) / (len(rows) - 1)
        assert abs(np.linalg.eigvalsh(naive)[-1] - reference(rows)[0][0]) > 1e-3 * reference(rows)[0][0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_rows_give_the_pca_of_the_stored_numbers(dtype: torch.dtype) -> None:
    stored = torch.tensor(cloud(offset=100.0)).to(dtype)
    same(pca(stored), stored.double().numpy())


def test_drifting_rows_and_a_first_row_far_away_lose_nothing() -> None:
    rows = np.concatenate([np.zeros((1, 7)), cloud(offset=1e6) + 1e3 * np.arange(600)[:, None]])
    state = StreamingPCA(7)
    for row in rows:
        state.update(row[None])
    same(state.finish(), rows)


def test_states_merge_in_any_order_into_the_whole() -> None:
    rows = cloud(offset=1e5)
    parts = [StreamingPCA(7).update(part) for part in np.array_split(rows, [1, 1, 250])]
    forward, backward = StreamingPCA(7), StreamingPCA(7)
    for part in parts:
        forward.merge(part)
    for part in reversed(parts):
        backward.merge(part)
    same(forward.finish(), rows)
    assert np.allclose(forward.finish().variances, backward.finish().variances, rtol=1e-12)
    assert forward.count == 600
    with pytest.raises(MergeRefused, match="width"):
        forward.merge(StreamingPCA(6))
    with pytest.raises(MergeRefused, match="correlation"):
        forward.merge(StreamingPCA(7, correlation=True))


def test_fewer_rows_than_dimensions() -> None:
    rows = cloud(5, 40)
    found = StreamingPCA(40).update(rows[:2]).update(rows[2:]).finish()
    assert found.axes.shape == (4, 40)
    same(found, rows)


def test_correlation_form_drops_and_lists_what_does_not_vary() -> None:
    rows = cloud() * 10.0 ** np.arange(7)
    rows[:, 2], rows[:, 5] = 0.1, 0.0
    found = pca(rows, correlation=True)
    kept = [0, 1, 3, 4, 6]
    assert found.constant == (2, 5)
    expected = np.linalg.eigvalsh(np.corrcoef(rows[:, kept].T))[::-1]
    assert np.allclose(found.variances[:5], expected, atol=1e-12)
    assert np.allclose(found.axes[:5, [2, 5]], 0)
    assert np.isfinite(found.project(rows)).all()
    plain = pca(rows)
    assert plain.constant == (2, 5)
    assert np.isfinite(plain.explained).all()


def test_rows_that_do_not_vary_at_all_have_shares_of_zero() -> None:
    found = pca(np.full((10, 3), 7.3))
    assert found.variances.tolist() == [0, 0, 0]
    assert found.explained.tolist() == [0, 0, 0]
    assert found.participation_ratio == 0


def test_rows_with_nan_or_infinities_are_left_out_and_counted() -> None:
    rows = cloud().astype(np.float32)
    spoiled = np.concatenate([rows, rows[:4]])
    spoiled[600, 2], spoiled[601, 0], spoiled[602, 1] = np.nan, np.inf, -np.inf
    found = pca(spoiled)
    assert found.excluded == 3
    same(found, np.concatenate([rows, rows[3:4]]))
    large = np.full((6, 2), 3e38, dtype=np.float32) * np.array([[1, -1]] * 3 + [[-1, 1]] * 3, dtype=np.float32)
    assert np.isfinite(pca(large).variances).all()
    with pytest.raises(BadInput, match=r"at least 3 .* 2 \(1 more"):
        pca(np.array([[1.0, 2.0], [3.0, 4.0], [np.nan, 0.0]]))


def test_signs_follow_the_rule_and_trajectories_follow_the_axis() -> None:
    rows = cloud()
    found, mirrored, permuted = pca(rows), pca(-rows), pca(rows[::-1].copy())
    assert np.allclose(found.axes, mirrored.axes)
    assert np.allclose(found.axes, permuted.axes)
    assert (found.axes[np.arange(7), np.abs(found.axes).argmax(1)] > 0).all()
    moved = pca(rows + 1e-4 * np.random.default_rng(1).normal(size=rows.shape)).towards(found)
    assert ((moved.axes * found.axes).sum(1) > 0).all()
    turned = pca(np.array([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]]))
    assert turned.ambiguous.all()
    assert not found.ambiguous.any()


def test_a_basis_survives_saving_and_refuses_strangers(tmp_path: Path) -> None:
    rows = cloud()
    rows[:, 3] = 1.0
    for correlation in (False, True):
        found = pca(rows, correlation, source="gpt2: layer 1")
        found.save(tmp_path / "m.safetensors")
        read = Manifold.load(tmp_path / "m.safetensors")
        assert np.array_equal(read.project(rows), found.project(rows))
        assert (read.constant, read.count, read.source) == ((3,), 600, "gpt2: layer 1")
        assert read.to_frame().equals(found.to_frame())
    with pytest.raises(BadRequest, match=r"\(rows, 7\)"):
        read.project(rows[:, :6])
    with pytest.raises(BadRequest, match="belongs to"):
        read.project(rows, source="llama: layer 1")
    with pytest.raises(BadRequest, match="7 axes, not 8"):
        read.project(rows, axes=8)
    (tmp_path / "broken").write_bytes(b"nothing")
    with pytest.raises(BadInput, match="holds no manifold"):
        Manifold.load(tmp_path / "broken")
    with pytest.raises(BadRequest, match="real numbers"):
        pca(np.array([["a", "b"]] * 3))
    with pytest.raises(BadRequest, match="rows, width"):
        pca(np.zeros(3))
