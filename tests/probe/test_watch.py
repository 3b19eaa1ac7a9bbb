"""The life of a watch: opening, stepping, reading, closing, and every refusal."""

from __future__ import annotations

import warnings

import pandas as pd
import pytest
import torch
import zoo

import advantage_probe as ap


def backward(model, seed: int = 0) -> None:
    model(**zoo.batch("llama", seed=seed)).loss.backward()


def test_the_readme_example_reads_after_the_block() -> None:
    model = zoo.llama()
    with ap.watch(model) as watch:
        backward(model)
        watch.step(loss_weight=1 / 16)
    table = watch.heads()
    assert list(table["label"]) == [f"L{layer}H{head}" for layer in range(2) for head in range(4)]
    assert table["kv_head"].tolist() == [0, 0, 1, 1] * 2
    assert (table["status"] == "ok").all()
    assert watch.loss_weight == 1 / 16


def test_a_frozen_model_works_and_keeps_no_gradient() -> None:
    model = zoo.llama().double()
    with ap.watch(model) as watch:
        backward(model)
    expected = watch.heads()
    model.zero_grad(set_to_none=True)
    model.requires_grad_(False)
    with ap.watch(model) as watch:
        backward(model)
    pd.testing.assert_frame_equal(watch.heads(), expected, rtol=1e-9, atol=1e-12)  # another way of adding up
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_embeddings_that_require_grad_are_enough() -> None:
    model = zoo.llama().requires_grad_(False)
    batch = zoo.batch("llama")
    embedded = model.get_input_embeddings()(batch["input_ids"]).detach().requires_grad_()
    with ap.watch(model) as watch:
        model(inputs_embeds=embedded, labels=batch["labels"]).loss.backward()
    assert embedded.grad is not None
    assert (watch.heads()["status"] == "ok").all()


def test_heads_that_no_gradient_reaches_are_listed_with_nan_and_a_status() -> None:
    model = zoo.llama().requires_grad_(False)
    model.model.layers[1].mlp.down_proj.requires_grad_(True)
    with pytest.warns(UserWarning, match="reach_all"), ap.watch(model) as watch:
        backward(model)
        watch.step()
    table = watch.heads()
    assert len(table) == 8
    assert table["status"].unique().tolist() == ["no gradient path"]
    assert table["routing_pressure"].isna().all()
    with ap.watch(model, reach_all=True) as watch:
        backward(model)
        watch.step()
    assert (watch.heads()["status"] == "ok").all()


def test_only_the_query_projection_trainable_is_a_full_capture() -> None:
    model = zoo.llama()
    with ap.watch(model) as watch:
        backward(model)
    expected = watch.heads()
    model.requires_grad_(False)
    model.model.layers[0].self_attn.q_proj.requires_grad_(True)
    with ap.watch(model) as watch:
        backward(model)
    assert watch.heads().equals(expected)


def test_every_counts_optimizer_steps_and_micro_batches_share_one() -> None:
    model = zoo.llama()
    with ap.watch(model, every=3) as watch:
        for step in range(7):
            backward(model, 2 * step)
            backward(model, 2 * step + 1)
            watch.step(1.0)
    history = watch.history()
    assert history["step"].unique().tolist() == [0, 3, 6]
    assert history["queries"].unique().tolist() == [36]
    assert watch.heads()["queries"].unique().tolist() == [108]
    one = watch.heads(step=3)
    assert one["queries"].unique().tolist() == [36]
    rows = history[history["step"] == 3].reset_index(drop=True)
    assert one["routing_pressure"].tolist() == rows["routing_pressure"].tolist()
    with pytest.raises(ap.BadRequest, match="not observed"):
        watch.heads(step=4)
    with pytest.raises(ap.BadRequest, match="whole watch"):
        watch.heads(step=3, intervals=True)


def test_pooled_sums_are_the_sums_of_the_steps() -> None:
    model = zoo.llama()
    with ap.watch(model) as watch:
        for step in range(3):
            backward(model, step)
            watch.step(1.0)
    steps = watch.history()
    steps["square"] = steps["score_slope"] * steps["queries"].astype(float)
    squares = steps.groupby(["module", "head"], observed=True)["square"].sum()
    table = watch.heads().set_index(["module", "head"])
    pooled = table["score_slope"] * table["queries"].astype(float)
    assert (squares - pooled).abs().max() < 1e-12


def test_layers_and_heads_restrict_the_tables() -> None:
    model = zoo.llama()
    with ap.watch(model, layers=[1], heads=[2, 3], detail="edges") as watch:
        backward(model)
    assert watch.heads()["label"].tolist() == ["L1H2", "L1H3"]
    assert set(watch.tokens()["label"]) == {"L1H2", "L1H3"}
    assert set(watch.edges()["label"]) == {"L1H2", "L1H3"}
    with pytest.raises(ap.NoAttentionSeen, match="layers"), ap.watch(model, layers=[7]) as watch:
        backward(model)
        watch.step()


def test_edges_are_the_largest_score_gradients_of_the_whole_run() -> None:
    from truth import recorded

    from advantage_probe.probe.law.definition import law

    model = zoo.llama()
    with ap.watch(model, detail="edges", edges=6) as watch:
        backward(model, 0)
        watch.step(1.0)
        backward(model, 1)
        watch.step(1.0)
    with recorded(model) as recorder:
        backward(model, 0)
        backward(model, 1)
    table = watch.edges(6)
    for layer in range(2):
        both = [law(call) for call in recorder.calls if call.site.layer == layer]
        for head in range(4):
            every = torch.cat([terms.score_gradient[:, head].flatten() for terms in both]).sort().values
            rows = table[(table["layer"] == layer) & (table["head"] == head)]
            routed = rows[rows["direction"] == "routed"]["score_gradient"].to_numpy()
            other = rows[rows["direction"] == "anti_routed"]["score_gradient"].to_numpy()
            assert routed == pytest.approx(every[:6].tolist(), rel=1e-5)
            assert other == pytest.approx(every.flip(0)[:6].tolist(), rel=1e-5)
    ids = [zoo.batch("llama", seed=seed)["input_ids"] for seed in (0, 1)]
    for row in table.itertuples():
        tokens = ids[row.sequence // 2][row.sequence % 2]
        assert int(tokens[row.query_position]) == row.query_token_id
        assert int(tokens[row.key_position]) == row.key_token_id
        assert row.score_gradient == pytest.approx(-row.attention * row.advantage, rel=1e-4, abs=1e-9)
    with pytest.raises(ap.BadRequest, match="edges=7"):
        watch.edges(7)


def test_token_rows_sum_to_the_heads_table() -> None:
    model = zoo.llama()
    with ap.watch(model, detail="tokens") as watch:
        backward(model)
    rows, table = watch.tokens(), watch.heads()
    queries = rows[rows["side"] == "query"].groupby(["layer", "head"])
    keys = rows[rows["side"] == "key"].groupby(["layer", "head"])
    assert queries.size().tolist() == [18] * 8
    assert queries["entropy"].mean().tolist() == pytest.approx(table["attention_entropy"].tolist())
    assert queries["advantage_missed"].mean().tolist() == pytest.approx(table["advantage_missed"].tolist())
    squares = keys["update_norm"].apply(lambda column: (column**2).sum())
    assert squares.tolist() == pytest.approx((-table["value_slope"] * table["queries"].astype(float)).tolist())
    assert keys["usage"].sum().tolist() == pytest.approx([18.0] * 8)


def test_update_directions_are_the_mean_of_the_value_gradients() -> None:
    from truth import recorded

    from advantage_probe.probe.law.definition import law

    model = zoo.llama()
    with ap.watch(model) as watch:
        backward(model)
    with recorded(model) as recorder:
        backward(model)
    table = watch.updates()
    for call in recorder.calls:
        m = law(call).value_gradient
        for head in range(4):
            row = table[(table["module"] == call.site.module) & (table["head"] == head)].iloc[0]
            found = [row[f"update_{place}"] for place in range(8)]
            assert found == pytest.approx((-m[:, head].mean((0, 1))).tolist(), rel=1e-4, abs=1e-8)
            singular = torch.linalg.svdvals(m[:, head].flatten(0, 1).double())
            assert row["share"] == pytest.approx(float(singular[0] ** 2 / singular.square().sum()), rel=1e-4)


def test_a_model_without_attention_is_refused_at_the_end_of_the_step() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
    watch = ap.watch(model)
    model(torch.randn(2, 3)).sum().backward()
    with pytest.raises(ap.NoAttentionSeen, match="Sequential"):
        watch.step()
    with pytest.raises(ap.NoAttentionSeen):
        watch.heads()
    watch.close()

    def block() -> None:
        with ap.watch(model):
            model(torch.randn(2, 3)).sum().backward()

    with pytest.raises(ap.NoAttentionSeen):
        block()


def test_forwards_without_gradients_are_named_as_the_reason() -> None:
    model = zoo.llama()
    with pytest.raises(ap.NoGradientReached, match="no_grad"), ap.watch(model) as watch:
        with torch.no_grad():
            model(**zoo.batch("llama"))
        watch.step()


def test_a_missing_backward_is_named() -> None:
    model = zoo.llama()
    with pytest.warns(UserWarning, match="backward"), ap.watch(model) as watch:
        model(**zoo.batch("llama"))
        watch.step()
    assert watch.heads()["status"].unique().tolist() == ["no gradient"]


def test_using_a_closed_watch_raises() -> None:
    model = zoo.llama()
    watch = ap.watch(model)
    backward(model)
    watch.step()
    watch.close()
    watch.close()
    for use in (watch.step, watch.reset, watch.__enter__):
        with pytest.raises(ap.ClosedWatch):
            use()
    assert len(watch.heads()) == 8


def test_reset_forgets() -> None:
    model = zoo.llama()
    with ap.watch(model) as watch:
        backward(model, 0)
        watch.step(1.0)
        watch.reset()
        backward(model, 1)
        watch.step(1.0)
        kept = watch.heads()
    with ap.watch(model) as watch:
        backward(model, 1)
        watch.step(1.0)
    assert kept.equals(watch.heads())


@pytest.mark.parametrize(
    "arguments",
    [{"every": 0}, {"every": 1.5}, {"every": True}, {"edges": 0}, {"detail": "everything"}, {"scaler": object()}],
)
def test_arguments_that_cannot_be_served_are_refused_before_anything_happens(arguments: dict) -> None:
    with pytest.raises(ap.BadRequest, match=next(iter(arguments))):
        ap.watch(zoo.llama(), **arguments)
    with pytest.raises(ap.BadRequest, match="Module"):
        ap.watch("gpt2")


@pytest.mark.parametrize("weight", [0, -1.0, float("nan"), float("inf")])
def test_a_loss_weight_must_be_positive(weight: float) -> None:
    model = zoo.llama()
    with ap.watch(model) as watch:
        backward(model)
        with pytest.raises(ap.BadRequest, match="loss_weight"):
            watch.step(loss_weight=weight)


def test_an_untold_loss_weight_is_recorded_as_unknown() -> None:
    model = zoo.llama()
    with ap.watch(model) as watch:
        backward(model)
        watch.step()
    assert watch.loss_weight == "unknown"
    assert watch.history()["loss_weight"].isna().all()


def test_a_wrong_reading_closes_the_watch_and_is_raised_at_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    from advantage_probe.hooks.adapters import huggingface as attention_registry

    model = zoo.llama()
    backward(model)
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    right = attention_registry.read
    monkeypatch.setattr(
        attention_registry, "read", lambda *given: replace(right(*given), scale=right(*given).scale * 1.01)
    )
    watch = ap.watch(model)
    backward(model)
    assert all(torch.equal(one, parameter.grad) for one, parameter in zip(expected, model.parameters()))
    assert watch.closed
    for read in (watch.step, watch.heads, watch.history, watch.state):
        with pytest.raises(ap.LawViolated, match="do not reproduce"):
            read()


def test_a_loss_scale_is_taken_out_of_u() -> None:
    model = zoo.llama()
    tables = []
    for size in (1.0, 65536.0):
        scaler = torch.amp.GradScaler("cpu", init_scale=size)
        with ap.watch(model, scaler=scaler) as watch:
            scaler.scale(model(**zoo.batch("llama")).loss).backward()
            watch.step(1.0)
        tables.append(watch.heads().select_dtypes("float64").drop(columns="law_residual"))
    assert ((tables[0] - tables[1]).abs() / tables[0].abs().max().clip(lower=1e-30)).max().max() < 1e-5


def test_losses_random_states_and_results_are_the_same_with_and_without() -> None:
    def train(watched: bool) -> tuple[list[float], torch.Tensor]:
        model = zoo.gpt2(resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.0).train()
        torch.manual_seed(3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        watch = ap.watch(model) if watched else None
        losses = []
        for step in range(6):
            loss = model(**zoo.batch("gpt2", seed=step)).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if watch is not None:
                watch.step(1.0)
                watch.heads(intervals=True)
        if watch is not None:
            watch.close()
        return losses, torch.get_rng_state()

    plain, watched = train(False), train(True)
    assert plain[0] == watched[0]
    assert torch.equal(plain[1], watched[1])


def test_memory_does_not_grow_with_the_steps() -> None:
    import gc

    model = zoo.llama()
    counts = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with ap.watch(model) as watch:
            for step in range(30):
                backward(model, step % 3)
                model.zero_grad(set_to_none=True)
                watch.step(1.0)
                if step in (10, 29):
                    gc.collect()
                    held = [entry for entry in gc.get_objects() if isinstance(entry, torch.Tensor)]
                    counts.append(sum(tensor.numel() for tensor in held if tensor.dim() >= 3))
    assert counts[0] == counts[1]


def test_a_run_whose_steps_were_all_skipped_says_so() -> None:
    model = zoo.llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with ap.watch(model, scaler=scaler) as watch:
        scaler.scale(model(**zoo.batch("llama")).loss).backward()
        model.lm_head.weight.grad[0, 0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        watch.step(1.0)
    assert watch.heads()["routing_pressure"].isna().all()
    assert watch.history()["status"].astype(str).str.contains("skipped").all()


def test_an_open_step_is_not_mixed_with_closed_ones() -> None:
    model = zoo.llama()
    with ap.watch(model) as watch:
        backward(model, 0)
        watch.step(loss_weight=1 / 16)
        closed = watch.heads()
        backward(model, 1)
        assert watch.heads().equals(closed)


@pytest.mark.parametrize("arguments", [{"layers": 1}, {"heads": 2}, {"layers": ["0"]}])
def test_layers_and_heads_are_lists_of_numbers(arguments: dict) -> None:
    with pytest.raises(ap.BadRequest, match=next(iter(arguments))):
        ap.watch(zoo.llama(), **arguments)
