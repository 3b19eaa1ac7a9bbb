"""Saved models of anybody's run: maps, pressures and loss agree with the model's own, and nothing more is claimed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from terminal import command, refused

from advantage_probe.analyses.dynamics import frame, saved_models


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny GPT-2 saved at five steps of a training loop, with its tokenizer, as a Trainer leaves them."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("trainer")
    words = {str(number): number for number in range(10)} | {"?": 10}
    plain = Tokenizer(models.WordLevel(words, unk_token="?"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="?")
    torch.manual_seed(0)
    sizes = {"n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": None, "eos_token_id": None}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=11, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **sizes))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    ids = (torch.arange(32) % 7).expand(4, 32).clone()
    for step in range(17):
        if step in (1, 2, 4, 8, 16):
            model.save_pretrained(folder / f"checkpoint-{step}")
            tokenizer.save_pretrained(folder / f"checkpoint-{step}")
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    (folder / "text.txt").write_text(" ".join(str(number % 7) for number in range(96)), encoding="utf-8")
    return folder


def test_frame_and_loss_are_the_models_own(run: Path) -> None:
    from transformers import AutoModelForCausalLM

    texts = [("text", (run / "text.txt").read_text(encoding="utf-8"))]
    found = saved_models.examine_saved(run, texts)
    ids = (torch.arange(96) % 7).view(3, 32)
    maps, losses = {}, {}
    for step in (1, 2, 4, 8, 16):
        model = AutoModelForCausalLM.from_pretrained(run / f"checkpoint-{step}", attn_implementation="eager").eval()
        with torch.no_grad():
            result = model(input_ids=ids, labels=ids, output_attentions=True)
        maps[step], losses[step] = torch.cat(result.attentions, 1), float(result.loss)
    curve = found.checkpoints.set_index("step")
    for step in (1, 2, 4, 8):
        expected = frame.divergence(maps[step], maps[16]).mean() / frame.divergence(maps[1], maps[16]).mean()
        assert curve.loc[step, "frame_whole"] == pytest.approx(float(expected), rel=2e-3)
        assert curve.loc[step, "loss"] == pytest.approx(losses[step], rel=1e-5)
    assert curve.loc[16, "frame_whole"] == pytest.approx(0, abs=1e-6)
    assert curve.loc[8, "frame_half"] == pytest.approx(0, abs=1e-6)
    assert found.targets == 3 * 31
    assert len(found.pressures) == 5 * 4


def test_the_command_reads_them_and_claims_no_order(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = command("dynamics", "--checkpoints", run, "--text", run / "text.txt", "--json", "--out", out)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["checkpoints"] == 5
    assert "is not said" in found["wording"]
    assert {"dynamics.png", "checkpoints.parquet", "pressures.csv", "run.json"} <= {path.name for path in out.iterdir()}
    shown = command("dynamics", "--checkpoints", run, "--text", run / "text.txt")
    assert "5 saved models" in shown.stdout


def test_what_is_missing_is_said(run: Path, tmp_path: Path) -> None:
    refused(command("dynamics", "--checkpoints", run), "--text FILE")
    (tmp_path / "checkpoint-3").mkdir()
    refused(command("dynamics", "--checkpoints", tmp_path, "--text", run / "text.txt"), "three or more")
    refused(command("dynamics", "--text", run / "text.txt", "--steps", "40"), "checkpoint-N")
