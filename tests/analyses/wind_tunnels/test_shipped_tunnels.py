"""Every shipped figure, recomputed from the weights on fresh sequences."""

import pytest

from advantage_probe.analyses.wind_tunnels.errors import UnusableCheckpoint
from advantage_probe.analyses.wind_tunnels.training.checkpoints import load_card
from advantage_probe.analyses.wind_tunnels.training.models import parameter_count
from advantage_probe.analyses.wind_tunnels.truth.shipped import MODELS, Check, evaluate, load, shipped_names


@pytest.mark.parametrize("name", shipped_names())
def test_a_shipped_model_keeps_every_figure_it_is_held_to(name):
    result = evaluate(name)
    assert result.checks
    for check in result.checks:
        assert check.passed, f"{check.what}: {check.measured:.5f} against {check.bound:.5f}"
    for figures in result.tables.values():
        assert figures.index[0] in ("uniform", "trained, layer 1")


@pytest.mark.parametrize("name", shipped_names())
def test_a_shipped_model_is_small_and_says_how_it_was_made(name):
    folder = MODELS / name
    assert (folder / "model.safetensors").stat().st_size <= 4_000_000
    card = load_card(folder)
    assert card["command"] == f"scripts/shipping/train_tunnels.py . {name}"
    assert card["curve"][-1]["step"] == card["recipe"]["steps"]
    task, model, _ = load(name)
    assert parameter_count(model) == card["parameters"]
    assert type(model).__name__ in ("GPT2LMHeadModel", "LlamaForCausalLM")
    assert task.length > 0


def test_weights_of_another_shape_are_refused(tmp_path):
    source = MODELS / "bijection-repeats"
    card = (source / "card.json").read_text()
    (tmp_path / "card.json").write_text(card.replace('"width": 96', '"width": 64'))
    (tmp_path / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    with pytest.raises(UnusableCheckpoint, match="not"):
        load(str(tmp_path))
    (tmp_path / "card.json").write_text(card.replace('"layers": 2', '"layers": 3'))
    with pytest.raises(UnusableCheckpoint, match="of another model"):
        load(str(tmp_path))


def test_a_check_can_fail_either_way():
    assert not Check("at most", 0.2, 0.1).passed
    assert not Check("at least", 0.1, 0.2, least=True).passed
    assert Check("at least", 0.2, 0.1, least=True).passed
