"""Queries, keys and masks in every shape that the kernel broadcasts, and tensors that are overwritten afterwards."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import zoo
from torch import nn
from transformers import DynamicCache, StaticCache

import advantage_probe as ap

RESIDUALS = ["query_residual", "key_residual", "value_residual"]


class Attending(nn.Module):
    """(…, T, 8) in, (…, 2 heads, T, 4) out."""

    def __init__(self, shared: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.projection, self.shared = nn.Linear(8, 24).double(), shared

    def forward(self, x, mask=None):
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(-2, -3) for part in self.projection(x).chunk(3, -1))
        if self.shared:
            k, v = k[:1], v[:1]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def summed(output):
    return output.sin().sum()


def inputs(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("shape", [(3, 5, 8), (2, 3, 5, 8)])
def test_keys_shared_by_the_batch_are_read_and_verified(shape: tuple[int, ...]) -> None:
    model, x = Attending(shared=True), inputs(*shape)
    plain = model(x)
    with ap.watch(model) as watch:
        output = model(x)
        summed(output).backward()
    assert torch.equal(output, plain)
    assert watch.heads()["queries"].tolist() == [x.shape[:-1].numel()] * 2
    assert float(watch.heads()["law_residual"].max()) < 1e-12
    assert float(ap.verify(model, {"x": x}, loss=summed)[RESIDUALS].max().max()) < 1e-12


@pytest.mark.parametrize("additive", [False, True])
def test_a_mask_per_window_of_queries_with_five_axes_is_read_window_by_window(additive: bool) -> None:
    """As in windowed vision transformers: (batch, windows, heads, T, D) under (windows, 1, T, T)."""
    model, x = Attending(), inputs(2, 3, 5, 8)
    seen = (torch.rand(3, 1, 5, 5, generator=torch.Generator().manual_seed(2)) > 0.4) | torch.eye(5, dtype=torch.bool)
    mask = torch.where(seen, 0.25, float("-inf")).double() if additive else seen
    with ap.watch(model) as watch:
        summed(model(x, mask)).backward()
    singly = []
    for window in range(3):
        with ap.watch(model) as one:
            summed(model(x[:, window], mask[window, 0])).backward()
        singly.append(one.heads())
    assert float(watch.heads()["law_residual"].max()) < 1e-12
    slope = sum(table["score_slope"] * table["queries"] for table in singly) / watch.heads()["queries"]
    torch.testing.assert_close(torch.tensor(watch.heads()["score_slope"]), torch.tensor(slope), rtol=1e-10, atol=0)
    assert float(ap.verify(model, {"x": x, "mask": mask}, loss=summed)[RESIDUALS].max().max()) < 1e-12


def test_an_empty_batch_adds_nothing() -> None:
    model = Attending()
    with ap.watch(model) as watch:
        with pytest.warns(UserWarning, match="no gradient came back"):
            summed(model(inputs(0, 5, 8))).backward()
            watch.step()
        summed(model(inputs(2, 5, 8))).backward()
        watch.step()
    with ap.watch(model) as plain:
        summed(model(inputs(2, 5, 8))).backward()
    assert watch.heads().equals(plain.heads())


def test_a_head_output_that_is_overwritten_is_refused_by_name_and_the_users_backward_goes_on() -> None:
    class Overwriting(Attending):
        def forward(self, x):
            q, k, v = (part.unflatten(-1, (2, 4)).transpose(-2, -3) for part in self.projection(x).chunk(3, -1))
            y = (q @ k.mT / 2).softmax(-1) @ v
            y = ap.expose(self, q, k, v, y, is_causal=False)
            return y.mul_(2)

    model, x = Overwriting(), inputs(2, 5, 8)
    summed(model(x)).backward()
    expected = model.projection.weight.grad.clone()
    model.zero_grad()
    watch = ap.watch(model)
    summed(model(x)).backward()
    assert torch.equal(model.projection.weight.grad, expected)
    with pytest.raises(ap.UnsupportedKernel, match=r"The model changes .* in place after attention"):
        watch.step()
    watch.close()


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_the_first_key_is_the_first_real_one_when_only_the_kernels_mask_knows_the_padding(implementation: str) -> None:
    model = zoo.llama(attn_implementation=implementation).double()
    ids = torch.randint(1, 31, (1, 6), generator=torch.Generator().manual_seed(4))
    with ap.watch(model) as alone:
        model(input_ids=ids, use_cache=False).logits.sin().sum().backward()
    padded = F.pad(ids, (3, 0))
    seen = torch.ones(9, 9, dtype=torch.bool).tril() & (torch.arange(9) >= 3)
    mask = torch.zeros(9, 9, dtype=torch.float64).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]
    places = (torch.arange(9) - 3).clamp(min=0)[None]
    with ap.watch(model) as masked:
        logits = model(input_ids=padded, attention_mask=mask, position_ids=places, use_cache=False).logits
        logits[:, 3:].sin().sum().backward()
    share = torch.tensor(masked.heads()["first_key_share"])
    torch.testing.assert_close(share, torch.tensor(alone.heads()["first_key_share"]), rtol=1e-5, atol=0)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_buffer_with_room_behind_the_queries_puts_them_where_they_are(attention: str) -> None:
    """A static cache of 16 places, continued from the sixth: the mask says which key is each query's own."""
    model = zoo.llama(attn_implementation=attention).double()
    ids = zoo.batch("llama", length=10)["input_ids"]
    tables = []
    for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=16)):
        with torch.no_grad():
            model(input_ids=ids[:, :6], past_key_values=cache)
        with ap.watch(model) as watch:
            places = torch.arange(6, 10)
            model(input_ids=ids[:, 6:], past_key_values=cache, cache_position=places).logits.square().sum().backward()
        tables.append(watch.heads())
    tolerance = 1e-9 if attention == "sdpa" else 1e-6  # transformers' eager softmax is float32 in any model
    for name in ("queries", "mean_distance", "attention_entropy", "routing_pressure", "first_key_share"):
        assert tables[1][name].tolist() == pytest.approx(tables[0][name].tolist(), rel=tolerance), name
