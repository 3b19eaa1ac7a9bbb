"""Numbers that stay the same under other ways of running (ranks, precisions, loss scalers), and warnings where not."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest
import torch
import zoo
from torch.distributed.fsdp import fully_shard

import advantage_probe as ap


def summed_loss(model, ids: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=ids).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")


def _rank(rank: int, folder: str, port: int, sharded: bool) -> None:
    """One of two ranks: three steps on its own two sequences, its state left in a file of its own."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    model = zoo.llama().double()
    if sharded:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        assert any(isinstance(one, torch.distributed.tensor.DTensor) for one in model.parameters())
    else:
        model = torch.nn.parallel.DistributedDataParallel(model)
    with ap.watch(model) as watch:
        for step in range(3):
            ids = zoo.batch("llama", seed=step, rows=4)["input_ids"][2 * rank : 2 * rank + 2]
            loss = summed_loss(model, ids)
            loss.backward()
            watch.step(loss_weight=1.0)
    torch.save(watch.heads(intervals=True).to_dict("list"), f"{folder}/heads{rank}.pt")
    state = watch.state()
    gathered: list = [None, None]
    torch.distributed.all_gather_object(gathered, state)
    if rank == 0:
        whole = gathered[0]
        whole.merge(gathered[1])
        from advantage_probe.probe import tables as frames

        frames.heads(whole, intervals=True).to_parquet(f"{folder}/merged.parquet")
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("sharded", [False, True], ids=["replicated", "fully sharded"])
def test_two_ranks_merge_to_the_run_of_one_process(tmp_path: Path, sharded: bool) -> None:
    import socket

    import pandas as pd

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(_rank, (str(tmp_path), port, sharded), nprocs=2)
    merged = pd.read_parquet(tmp_path / "merged.parquet")
    model = zoo.llama().double()
    with ap.watch(model) as watch:
        for step in range(3):
            summed_loss(model, zoo.batch("llama", seed=step, rows=4)["input_ids"]).backward()
            watch.step(loss_weight=1.0)
    single = watch.heads(intervals=True)
    assert merged["queries"].tolist() == single["queries"].tolist()
    for name in single.select_dtypes("float64").columns:
        if not name.startswith("law_residual"):
            scale = single[name].abs().max() or 1.0
            assert (merged[name] - single[name]).abs().max() <= 1e-10 * scale, name


def test_layers_of_different_precision_end_on_the_cpu_with_the_numbers_of_one() -> None:
    class Mixed(torch.nn.Module):
        """Two attention layers, the second on a float64 copy of its input: as if it lived on another device."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first = torch.nn.MultiheadAttention(16, 4, batch_first=True)
            self.second = torch.nn.MultiheadAttention(16, 4, batch_first=True).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + self.first(x, x, x, need_weights=False)[0]
            y = x.to(torch.float64)
            return x + self.second(y, y, y, need_weights=False)[0].to(x.dtype)

    model = Mixed()
    x = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(1))
    tables = []
    for module, inputs in ((model, x), (Mixed().double(), x.double())):
        with ap.watch(module) as watch:
            module(inputs).square().sum().backward()
        tables.append(watch.heads())
    assert all(entry.sums.total.device.type == "cpu" for entry in watch.state().entries.values())
    for name in ("attention_entropy", "routing_pressure", "content_pressure", "coherence"):
        assert tables[0][name].tolist() == pytest.approx(tables[1][name].tolist(), rel=1e-4)


def test_a_step_that_the_scaler_skips_is_marked_and_left_out() -> None:
    model = zoo.llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with ap.watch(model, scaler=scaler) as watch:
        for step in range(3):
            optimizer.zero_grad()
            scaler.scale(model(**zoo.batch("llama", seed=step)).loss).backward()
            if step == 1:
                model.lm_head.weight.grad[0, 0] = torch.inf
            scaler.step(optimizer)
            scaler.update()
            watch.step(1.0)
    history = watch.history()
    skipped = history["status"].astype(str).str.contains("skipped")
    assert history.loc[skipped, "step"].unique().tolist() == [1]
    assert history["loss_scale"].notna().all()
    assert watch.heads()["queries"].unique().tolist() == [36]


def test_a_loss_scale_that_was_not_told_is_recorded_as_unknown() -> None:
    model = zoo.llama()
    with ap.watch(model) as watch:
        model(**zoo.batch("llama")).loss.backward()
        watch.step(1.0)
    assert watch.history()["loss_scale"].isna().all()


def test_forgotten_padding_is_warned_about_and_a_genuine_end_is_not() -> None:
    model = zoo.bert()  # its padding id is 0
    ids = zoo.batch("bert")["input_ids"]
    padded = ids.clone()
    padded[1, -3:] = 0
    with pytest.warns(UserWarning, match="attention_mask"), ap.watch(model):
        model(input_ids=padded, labels=ids).loss.backward()
    ended = ids.clone()
    ended[1, -1] = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with ap.watch(model):
            model(input_ids=ended, labels=ids).loss.backward()
        with ap.watch(model):
            model(input_ids=padded, attention_mask=(padded != 0).long(), labels=ids).loss.backward()
