"""What is loaded is what the folder holds: nothing is drawn at random in its place."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import zoo
from safetensors.torch import load_file, save_file

from advantage_probe.analyses.files.export import write_text
from advantage_probe.analyses.inputs.loading import load
from advantage_probe.hooks.errors import BadInput


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    zoo.llama().save_pretrained(tmp_path / "model")
    zoo.tokenizer(zoo.VOCABULARY).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def rewritten(folder: Path, change) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def test_a_checkpoint_without_its_head_is_refused_by_the_names_of_what_is_missing(folder: Path) -> None:
    rewritten(folder, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(BadInput, match=r"lacks the weights lm_head\.weight, which would be drawn at random"):
        load(str(folder))


def test_tied_heads_are_not_missing(tmp_path: Path) -> None:
    model = zoo.gpt2()
    assert model.config.tie_word_embeddings
    model.save_pretrained(tmp_path)
    zoo.tokenizer(zoo.VOCABULARY).save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    found = load(str(tmp_path)).model
    assert torch.equal(found.lm_head.weight, model.lm_head.weight)


def test_an_adapter_loads_with_the_model_that_lies_beside_it(folder: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base = zoo.llama()
    joined = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    with torch.no_grad():
        for name, parameter in joined.named_parameters():
            if "lora_B" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(0))
    joined.peft_config["default"].base_model_name_or_path = str(folder)
    joined.save_pretrained(tmp_path / "adapter")
    ids = zoo.batch("llama")["input_ids"]
    found = load(str(tmp_path / "adapter")).model
    torch.testing.assert_close(found(input_ids=ids).logits, joined.eval()(input_ids=ids).logits, rtol=1e-4, atol=1e-5)
    names = [name for name, _ in found.named_modules()]
    assert "model.layers.0.self_attn" in names
    (tmp_path / "adapter" / "adapter_config.json").write_text('{"base_model_name_or_path": "nowhere"}')
    with pytest.raises(BadInput, match="is for 'nowhere', which is no folder here"):
        load(str(tmp_path / "adapter"))


def test_links_devices_and_folders_are_not_replaced_by_files(tmp_path: Path) -> None:
    (tmp_path / "real.txt").write_text("kept")
    (tmp_path / "link.txt").symlink_to(tmp_path / "real.txt")
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "folder.txt").mkdir()
    for name in ("link.txt", "pipe.txt", "folder.txt"):
        with pytest.raises(BadInput, match="a link, a device or a folder"):
            write_text("new", tmp_path / name)
    assert (tmp_path / "real.txt").read_text() == "kept"
    assert (tmp_path / "link.txt").is_symlink()
    with pytest.raises(BadInput, match="could not be written"):
        write_text("new", Path("/dev/null"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder.txt", "link.txt", "pipe.txt", "real.txt"]
