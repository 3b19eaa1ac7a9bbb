"""The life of watches: beside threads, copies, other people's hooks and other watches, without a trace."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import warnings
from typing import Any

import plain
import pytest
import torch
import zoo
from torch import nn

import advantage_probe as ap
from advantage_probe.hooks import attachment, override
from advantage_probe.hooks.adapters import compiled

# -- no gradients, threads, copies -------------------------------------------------------------------------------------


def live() -> int:
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return sum(1 for entry in gc.get_objects() if isinstance(entry, torch.Tensor))


def test_forwards_without_gradients_leave_nothing_behind_and_are_said_once() -> None:
    model = zoo.llama().train()
    with pytest.warns(UserWarning, match="no_grad") as said, ap.watch(model) as watch:
        counts = []
        for _ in range(60):
            with torch.no_grad():
                model(**zoo.batch("llama"))
            counts.append(live() if len(counts) % 20 == 0 else 0)
        model(**zoo.batch("llama")).loss.backward()
    assert counts[40] <= counts[20]
    assert len([entry for entry in said if "no_grad" in str(entry.message)]) == 1
    assert watch.heads()["queries"].max() == 18


def test_evaluation_without_gradients_inside_a_watch_says_nothing() -> None:
    model = zoo.llama()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with ap.watch(model) as watch:
            with torch.no_grad():
                model(**zoo.batch("llama"))
            model(**zoo.batch("llama")).loss.backward()
    assert watch.heads()["queries"].max() == 18


@pytest.mark.parametrize("kind", ["registry", "functional"])
def test_threads_do_not_see_each_other(kind: str) -> None:
    def work(heads: int, out: dict[int, Any]) -> None:
        torch.manual_seed(heads)
        model = models[heads]
        with ap.watch(model) as watch:
            for step in range(8):
                batch = zoo.batch("llama", seed=step)
                if kind == "functional":
                    model(batch["input_ids"]).backward()
                else:
                    model(**batch).loss.backward()
        out[heads] = watch.heads()

    if kind == "registry":
        models = {heads: zoo.llama(num_attention_heads=heads, num_key_value_heads=2) for heads in (2, 4)}
    else:
        models = {heads: plain.gpt("name", layers=heads) for heads in (1, 2)}
    alone: dict[int, Any] = {}
    together: dict[int, Any] = {}
    for heads in models:
        work(heads, alone)
    threads = [threading.Thread(target=work, args=(heads, together)) for heads in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for heads in models:
        assert together[heads].equals(alone[heads])


def test_a_backward_on_another_thread_arrives() -> None:
    model = plain.gpt()
    with ap.watch(model) as watch:
        loss = model(plain.ids())
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
    assert watch.heads()["queries"].max() == 18


@pytest.mark.parametrize("build", [plain.gpt, zoo.llama])
def test_copies_saves_and_averages_of_a_watched_model_work_and_record_nothing(build: Any) -> None:
    model = build()
    batch = plain.ids()

    def run(which: nn.Module) -> None:
        found = which(batch) if build is plain.gpt else which(input_ids=batch, labels=batch).loss
        found.backward()

    with ap.watch(model) as watch:
        run(model)
        rows = watch.heads()["queries"].tolist()
        twin = copy.deepcopy(model)
        average = torch.optim.swa_utils.AveragedModel(model)
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=False)
        for other in (twin, average.module, loaded, pickle.loads(pickle.dumps(model))):
            run(other)
        assert watch.heads()["queries"].tolist() == rows
        keys = list(model.state_dict())
    assert keys == list(model.state_dict()) == list(twin.state_dict())


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", ["registry", "functional"])
def test_a_twin_that_nobody_watches_is_not_taken_for_the_watched_model(kind: str, reentrant: bool) -> None:
    if kind == "registry":
        model = zoo.llama().train()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    else:
        model = plain.gpt(checkpoint=reentrant)
    twin = copy.deepcopy(model)

    def loss(which: nn.Module) -> torch.Tensor:
        return which(plain.ids()) if kind == "functional" else which(**zoo.batch("llama")).loss

    loss(model).backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    with ap.watch(model) as watch:
        one, other = loss(model), loss(twin)  # bit-equal queries in both
        other.backward()
        assert not any(entry.sums.total.any() for entry in watch.state().entries.values())
        one.backward()
    assert watch.heads()["queries"].max() == 18
    for which in (model, twin):
        assert all(torch.equal(parameter.grad, grad) for parameter, grad in zip(which.parameters(), expected))


def test_hooks_of_other_people_stay_and_see_what_they_saw() -> None:
    model = plain.gpt()
    seen: list[str] = []
    model.h[0].attn.register_forward_hook(lambda module, args, out: seen.append("forward"))
    model.h[0].attn.register_full_backward_hook(lambda module, into, out: seen.append("backward"))
    with ap.watch(model):
        model(plain.ids()).backward()
    assert seen == ["forward", "backward"]
    assert len(model.h[0].attn._forward_hooks) == 1


# -- many watches ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [plain.gpt, zoo.llama])
def test_a_thousand_watches_leave_nothing_behind(build: Any) -> None:
    model = build()
    ap.watch(model).close()
    before, objects = live(), len(gc.get_objects())
    for _ in range(1000):
        ap.watch(model).close()
    assert live() == before
    assert len(gc.get_objects()) < objects + 200
    assert not override._active
    assert not attachment._by_module
    assert not attachment._attachments
    assert not compiled.watched
    assert all(not module._forward_hooks and not module._backward_hooks for module in model.modules())


def test_accumulated_micro_batches_equal_one_batch_after_their_weight_is_taken_out() -> None:
    model = zoo.llama()
    batch = zoo.batch("llama", rows=4)
    tables = []
    for parts in (1, 2):
        with ap.watch(model) as watch:
            for chunk in batch["input_ids"].chunk(parts):
                (model(input_ids=chunk, labels=chunk).loss / parts).backward()
            watch.step(loss_weight=1 / (4 * 8))
        tables.append(watch.heads())
        model.zero_grad()
    for column in ("attention_entropy", "routing_pressure", "content_pressure", "alignment", "update_cosine"):
        assert tables[0][column].tolist() == pytest.approx(tables[1][column].tolist(), rel=1e-4), column


def test_layers_on_two_devices_or_dtypes_meet_nowhere() -> None:
    class Elsewhere(nn.Module):
        def __init__(self, block: nn.Module) -> None:
            super().__init__()
            self.block = block.double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.block(x.double()).float()

    model = plain.gpt()
    model.h[1] = Elsewhere(model.h[1])
    with ap.watch(model) as watch:
        model(plain.ids()).backward()
    assert (watch.heads()["status"] == "ok").all()
    assert set(watch.heads()["module"]) == {"h.0.attn", "h.1.block.attn"}


# -- distributed -------------------------------------------------------------------------------------------------------


@pytest.fixture
def alone(tmp_path: Any) -> Any:
    """A process group of one."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield dist.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_query_shards_of_one_sequence_are_refused(alone: Any) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    class Bare(nn.Module):
        def forward(self, q, k, v):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    parts = [torch.randn(1, 2, 8, 4, requires_grad=True) for _ in range(3)]
    model = Bare()
    with pytest.raises(ap.UnsupportedKernel, match="Query shards"), ap.watch(model) as watch:
        model(*(distribute_tensor(part, alone, [Shard(2)]) for part in parts))
        watch.step()


def test_fully_sharded_parameters_change_nothing(alone: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    model = zoo.llama()
    with ap.watch(model) as watch:
        model(**zoo.batch("llama")).loss.backward()
    expected = watch.heads()
    model.zero_grad(set_to_none=True)
    for layer in model.model.layers:
        fully_shard(layer, mesh=alone)
    fully_shard(model, mesh=alone)
    with ap.watch(model) as watch:
        model(**zoo.batch("llama")).loss.backward()
    assert set(watch.heads()["module"]) == set(expected["module"])
    assert watch.heads()["routing_pressure"].tolist() == pytest.approx(expected["routing_pressure"].tolist(), rel=1e-5)
