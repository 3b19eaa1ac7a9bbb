"""Hooks into training loops give the history that a loop written by hand gives, and change nothing of the run."""

import copy
import pickle

import accelerate
import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from loops import (
    ACCUMULATION,
    BATCH,
    DATA,
    KILLED,
    InOrder,
    Kill,
    Losses,
    by_hand,
    loader,
    made,
    same_history,
    stacked,
    targets,
    trainer,
)
from torch import nn
from transformers import TrainerCallback
from zoo import gpt2

import advantage_probe as ap
from advantage_probe.probe.loops.trainer import loss_names, shifts_labels, takes_items


@pytest.fixture(scope="module")
def reference() -> tuple[pd.DataFrame, list[float], nn.Module]:
    return by_hand()


def test_a_trainer_that_is_killed_and_resumed_gives_the_history_of_the_hand_written_loop(tmp_path, reference):
    expected, losses, trained = reference
    model, optimizer = made()
    watch, seen = ap.watch(model, history=tmp_path / "history"), Losses()
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path / "run", model, optimizer, ap.TrainerHook(watch), seen, Kill()).train()
    hooks = sum(len(module._forward_pre_hooks) for module in model.modules())
    watch.flush()
    assert watch.history()["step"].max() == KILLED - 1
    watch.close()
    assert hooks == 1
    assert not any(module._forward_pre_hooks for module in model.modules())
    model, optimizer = made()
    with ap.watch(model, history=tmp_path / "history") as watch:
        trainer(tmp_path / "run", model, optimizer, ap.TrainerHook(watch), seen).train(resume_from_checkpoint=True)
        assert watch.heads()["queries"].notna().all()
    same_history(watch.history(), expected)
    same_history(pd.read_parquet(tmp_path / "history").astype({"module": "category"}), expected)
    assert watch.loss_weight == "varied"
    found = [seen.found[step] for step in sorted(seen.found)]
    np.testing.assert_allclose(found, losses, rtol=2e-5, atol=1e-4)
    for ours, theirs in zip(model.parameters(), trained.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_trainer_whose_loss_is_a_mean_per_micro_batch_is_weighed_micro_batch_by_micro_batch(tmp_path):
    class Plain(nn.Module):
        """Takes no loss arguments, so that the Trainer divides by the number of micro-batches."""

        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.config, self.loss_type = inner, inner.config, inner.loss_type

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.inner(input_ids=input_ids, labels=labels).loss}

    expected, _, _ = by_hand(per_batch=True)
    model, optimizer = made()
    with ap.watch(model) as watch:
        run = trainer(tmp_path, Plain(model), optimizer, ap.TrainerHook(watch), max_steps=10)
        assert not run.model_accepts_loss_kwargs
        run.args.eval_strategy = "no"
        run.train()
    same_history(watch.history(), expected[expected["step"] < 10])


def test_losses_random_state_and_weights_of_a_trainer_are_what_they_are_without_a_hook(tmp_path):
    outcomes = []
    for watched in (False, True):
        seen = Losses()
        model, optimizer = made(resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)
        hooks: list[TrainerCallback] = [seen]
        if watched:
            watch = ap.watch(model, every=3, history=tmp_path / "history")
            hooks.append(ap.TrainerHook(watch))
        trainer(tmp_path / f"run{watched}", model, optimizer, *hooks, max_steps=9).train()
        outcomes.append((seen.found, torch.get_rng_state(), [p.detach().clone() for p in model.parameters()]))
    watch.close()
    assert watch.history()["step"].unique().tolist() == [0, 3, 6]
    without, with_hook = outcomes
    assert without[0] == with_hook[0]
    assert torch.equal(without[1], with_hook[1])
    assert all(torch.equal(a, b) for a, b in zip(without[2], with_hook[2], strict=True))


def test_a_trainer_goes_on_when_reading_breaks_later_and_stops_when_it_breaks_at_once(tmp_path):
    class Broken(TrainerCallback):
        """Lets the watch meet an error of its own at a chosen step."""

        def __init__(self, watch: ap.Watch, step: int) -> None:
            self.watch, self.step = watch, step

        def on_step_begin(self, args, state, control, **_):
            if state.global_step == self.step:
                self.watch._recorder.refuse(ap.UnsupportedKernel("no such kernel; choose another."))

    for step in (0, 2):
        model, optimizer = made()
        watch = ap.watch(model)
        run = trainer(tmp_path / str(step), model, optimizer, Broken(watch, step), ap.TrainerHook(watch), max_steps=5)
        if step == 0:
            with pytest.raises(ap.UnsupportedKernel, match="no such kernel"):
                run.train()
        else:
            with pytest.warns(UserWarning, match="training goes on: UnsupportedKernel") as reported:
                run.train()
            assert len([one for one in reported if "training goes on" in str(one.message)]) == 1
            assert run.state.global_step == 5
            with pytest.raises(ap.UnsupportedKernel):
                watch.history()
        watch.close()


def test_a_closed_watch_and_things_that_are_no_watch_are_refused_before_training(tmp_path):
    model, optimizer = made()
    with pytest.raises(ap.BadRequest, match="takes the watch that watch\\(model\\) returned"):
        ap.TrainerHook(model)
    watch = ap.watch(model)
    watch.close()
    with pytest.raises(ap.ClosedWatch, match="open a new one"):
        trainer(tmp_path, model, optimizer, ap.TrainerHook(watch), max_steps=2).train()


def test_whether_a_model_shifts_its_labels_is_read_off_its_loss():
    from transformers import T5Config, T5ForConditionalGeneration

    assert shifts_labels(made()[0])
    assert shifts_labels(gpt2())  # its class names no loss: the library takes the causal one
    assert (
        shifts_labels(T5ForConditionalGeneration(T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)))
        is False
    )
    assert shifts_labels(nn.Linear(2, 2)) is None


def test_a_loss_weight_of_ones_own_is_taken_as_given(tmp_path):
    def run(told):
        model, optimizer = made()
        with ap.watch(model) as watch:
            trainer(tmp_path, model, optimizer, ap.TrainerHook(watch, told), max_steps=2).train()
        return watch

    single = run(0.25)
    assert single.loss_weight == 0.25
    counted = run(lambda inputs: 0.25 + 0 * len(inputs["labels"]))
    same_history(counted.history(), single.history(), 0.0)
    halved = run(0.5).history()
    np.testing.assert_allclose(halved["content_pressure"] * 2, single.history()["content_pressure"], rtol=1e-12)


def test_an_accelerate_loop_gives_the_history_of_the_hand_written_loop():
    expected, _, _ = by_hand(per_batch=True)
    model, optimizer = made()
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATION)
    prepared, optimizer, batches = accelerator.prepare(model, optimizer, loader())
    with ap.watch(prepared) as watch:
        for batch in batches:
            with accelerator.accumulate(prepared):
                loss = prepared(**batch).loss
                watch.weigh(1 / (targets(batch) * ACCUMULATION))
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(prepared.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                watch.step()
    same_history(watch.history(), expected)


class Own(InOrder):
    """A loss of the user's own: the model's mean, which the Trainer then leaves undivided."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(**inputs).loss


def mean_loss(outputs, labels, num_items_in_batch=None):
    return F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


@pytest.mark.parametrize("own", ["compute_loss", "compute_loss_func"])
def test_the_weight_of_a_loss_of_ones_own_is_unknown_unless_it_is_told(tmp_path, own):
    model, optimizer = made()
    with ap.watch(model) as watch:
        run = trainer(tmp_path, model, optimizer, ap.TrainerHook(watch), max_steps=2, save_strategy="no")
        run.args.eval_strategy = "no"
        if own == "compute_loss":
            run.compute_loss = Own.compute_loss.__get__(run)
        else:
            run.compute_loss_func = mean_loss
        run.train()
    assert watch.loss_weight == "unknown"
    assert watch.history()["loss_weight"].isna().all()


def encoder_decoder() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    sizes = {
        "vocab_size": 40,
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 16,
        "num_layers": 1,
        "num_heads": 2,
        "dropout_rate": 0.0,
    }
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0)).train()


def masked() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    sizes = {
        "vocab_size": 40,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForMaskedLM(BertConfig(**sizes, **none)).train()


@pytest.mark.parametrize("make", [encoder_decoder, masked])
def test_a_model_that_takes_the_number_of_items_and_ignores_it_is_weighed_by_its_own_mean(tmp_path, make):
    model = make()
    with ap.watch(model) as watch:  # the loss that every target sees, whatever the Trainer makes of the means
        for start in range(0, BATCH * ACCUMULATION, BATCH):
            batch = stacked(DATA[start : start + BATCH])
            watch.weigh(1 / int(batch["labels"].ne(-100).sum()))
            model(**batch).loss.backward()
        watch.step()
    expected = watch.history()
    model = make()
    with ap.watch(model) as watch:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        run = trainer(tmp_path, model, optimizer, ap.TrainerHook(watch), max_steps=1, save_strategy="no")
        run.args.eval_strategy = "no"
        assert run.model_accepts_loss_kwargs
        run.train()
    same_history(watch.history(), expected)


def test_adapters_are_looked_through_whoever_added_them():
    from peft import LoraConfig, get_peft_model

    wrapped = get_peft_model(made()[0], LoraConfig(target_modules=["q_proj"]))
    native = made()[0]
    native.peft_config = {"default": LoraConfig()}  # as `native.add_adapter` leaves it
    for model in (wrapped, native):
        assert shifts_labels(model)
        assert takes_items(model)
        assert "loss_function" in loss_names(model)


def test_a_class_name_alone_does_not_say_that_labels_are_shifted():
    from transformers import BartConfig, BartForCausalLM

    sizes = {"vocab_size": 40, "d_model": 8, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 8}
    assert shifts_labels(BartForCausalLM(BartConfig(**sizes, is_encoder_decoder=False))) is None


def test_an_error_that_closes_the_watch_in_the_backward_is_raised_at_the_first_step(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise ap.LawViolated("weights do not reproduce the output")

    model, optimizer = made()
    watch = ap.watch(model)
    monkeypatch.setattr(watch._recorder, "_add", fail)
    with pytest.raises(ap.LawViolated, match="do not reproduce"):
        trainer(tmp_path, model, optimizer, ap.TrainerHook(watch), max_steps=3).train()
    assert watch.closed


def test_a_model_is_copied_and_pickled_while_a_hook_is_on_it_and_the_copy_tells_the_watch_nothing(tmp_path):
    class Copies(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **_):
            self.found = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
            for other in self.found:
                other(**stacked(DATA[:2])).loss.backward()

    model, optimizer = made()
    with ap.watch(model) as watch:
        trainer(tmp_path, model, optimizer, ap.TrainerHook(watch), Copies(), max_steps=2).train()
    expected, _, _ = by_hand()
    same_history(watch.history(), expected[expected["step"] < 2])


def test_a_micro_batch_whose_weight_is_not_known_makes_the_weight_of_its_step_unknown():
    model, _ = made()
    with ap.watch(model) as watch:
        for known in (True, False):
            watch.weigh(1 / 8 if known else None)
            model(**stacked(DATA[:2])).loss.backward()
        watch.step()
    assert watch.loss_weight == "unknown"


def test_half_a_step_of_a_run_that_was_given_up_is_no_part_of_the_next_one(tmp_path):
    class GiveUp(TrainerCallback):
        def on_substep_end(self, args, state, control, **_):
            raise KeyboardInterrupt

    expected, _, _ = by_hand()
    model, optimizer = made()
    with ap.watch(model) as watch:
        with pytest.raises(KeyboardInterrupt):
            trainer(tmp_path / "first", model, optimizer, ap.TrainerHook(watch), GiveUp()).train()
        model.zero_grad()
        trainer(tmp_path / "second", model, optimizer, ap.TrainerHook(watch), max_steps=2).train()
    same_history(watch.history(), expected[expected["step"] < 2])
