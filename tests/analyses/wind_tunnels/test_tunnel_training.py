"""Training: resumable without a seam, blind to the global generator, supervised where the task says."""

import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace

import pytest
import torch

from advantage_probe.analyses.wind_tunnels import Bijection, ConjugateCounts, NoisyChain
from advantage_probe.analyses.wind_tunnels.errors import TunnelError, UnknownTunnel, UnusableCheckpoint
from advantage_probe.analyses.wind_tunnels.training.checkpoints import load_card, load_run, write_whole
from advantage_probe.analyses.wind_tunnels.training.controls import KINDS, called, control, train_controls
from advantage_probe.analyses.wind_tunnels.training.models import Shape, build, logits, parameter_count
from advantage_probe.analyses.wind_tunnels.training.recipes import PRESETS, TASKS, Recipe, recipe, shortened
from advantage_probe.analyses.wind_tunnels.training.recorded import ranges, recorded_controls
from advantage_probe.analyses.wind_tunnels.training.runner import episode_length, learning_rate, objective, train
from advantage_probe.analyses.wind_tunnels.truth.calibration import calibrate, held_out, model_rows, table
from advantage_probe.analyses.wind_tunnels.truth.shipped import MODELS, shipped_names

TASK = Bijection(symbols=4, pairs=4, repeats=0.5)
TINY = Recipe(Shape("gpt2", 1, 2, 16), steps=24, batch=8, warm_up=4)


@dataclass(frozen=True)
class Interrupted(Bijection):
    """A tunnel that is stopped in the middle of a run, at its n-th draw."""

    draws: int = 14

    def sample(self, n, generator, length=None):
        if n == TINY.batch:
            object.__setattr__(self, "draws", self.draws - 1)
            if self.draws < 0:
                raise KeyboardInterrupt
        return super().sample(n, generator, length)


def same_weights(left: torch.nn.Module, right: torch.nn.Module) -> bool:
    pairs = zip(left.parameters(), right.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_an_interrupted_run_continues_the_same_curve_to_the_same_weights(tmp_path):
    whole, curve = train(TASK, TINY, tmp_path / "whole", interval=6)
    with pytest.raises(KeyboardInterrupt):
        train(Interrupted(4, 4, 0.5), TINY, tmp_path / "cut", interval=6)
    assert load_run(tmp_path / "cut")["step"] == 12
    resumed, again = train(TASK, TINY, tmp_path / "cut", interval=6, resume=True)
    assert again == curve
    assert [row["step"] for row in curve] == [6, 12, 18, 24]
    assert same_weights(whole, resumed)


KILLED = """
import sys
from pathlib import Path
from advantage_probe.analyses.wind_tunnels import Bijection
from advantage_probe.analyses.wind_tunnels.training.models import Shape
from advantage_probe.analyses.wind_tunnels.training.recipes import Recipe
from advantage_probe.analyses.wind_tunnels.training.runner import train
recipe = Recipe(Shape("gpt2", 1, 2, 16), steps=int(sys.argv[2]), batch=8, warm_up=4)
train(Bijection(4, 4, 0.5), recipe, Path(sys.argv[1]), interval=6)
"""


def test_a_kill_at_any_moment_leaves_a_run_that_can_be_resumed(tmp_path):
    steps = 100_000
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path), str(steps)], env={**os.environ})
    try:
        for _ in range(1_200):
            if (tmp_path / "run.pt").exists() or process.poll() is not None:
                break
            time.sleep(0.1)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    saved = load_run(tmp_path)
    assert saved is not None
    assert saved["step"] % 6 == 0
    assert saved["curve"][-1]["step"] == saved["step"]
    longer = replace(TINY, steps=steps)
    fresh = build(longer.shape, TASK, longer.seed)
    fresh.load_state_dict(saved["model"])


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path):
    path = tmp_path / "run.pt"
    path.write_text("old")

    def torn(partial):
        partial.write_text("ne")
        raise OSError("disk full")

    with pytest.raises(UnusableCheckpoint, match="disk full"):
        write_whole(path, torn)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_run_with_other_settings_is_not_resumed(tmp_path):
    train(TASK, TINY, tmp_path, interval=12)
    with pytest.raises(UnusableCheckpoint, match="other settings"):
        train(TASK, replace(TINY, learning_rate=5e-4), tmp_path, interval=12, resume=True)
    (tmp_path / "run.pt").write_bytes(b"torn")
    with pytest.raises(UnusableCheckpoint, match="cannot be read"):
        train(TASK, TINY, tmp_path, interval=12, resume=True)


def test_training_leaves_the_global_generator_alone_and_ignores_it():
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first, _ = train(TASK, TINY)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(2)
    second, _ = train(TASK, TINY)
    assert same_weights(first, second)


def test_a_little_training_beats_the_uniform_answer():
    coin = ConjugateCounts.coin(0.3, 0.3, length=12)
    _, curve = train(coin, Recipe(Shape("gpt2", 1, 2, 32), steps=150, batch=32, learning_rate=3e-3, warm_up=10))
    tokens = coin.sample(2_000, torch.Generator().manual_seed(9)).tokens
    uniform = float((1 - coin.entropy(tokens)).mean())
    assert curve[-1]["kl"] < uniform / 3


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_embedded_tasks_enter_through_zero_padded_inputs(family):
    task = NoisyChain(symbols=3, dimensions=5, length=6)
    tokens = task.sample(2, torch.Generator().manual_seed(0)).tokens
    model = build(Shape(family, 1, 2, 16), task, seed=0)
    padded = torch.cat((tokens, torch.zeros(2, 6, 11)), -1)
    assert torch.equal(logits(model, tokens), model(inputs_embeds=padded).logits)
    with pytest.raises(TunnelError, match="20 dimensions"):
        logits(model, torch.zeros(1, 2, 20))
    _, curve = train(task, Recipe(Shape(family, 1, 2, 16), steps=4, batch=8, warm_up=2))
    assert curve[-1]["step"] == 4


def test_the_learning_rate_warms_up_and_falls_to_a_fiftieth():
    plan = Recipe(steps=1_000, learning_rate=0.1, warm_up=100)
    assert learning_rate(plan, 0) == pytest.approx(0.001)
    assert learning_rate(plan, 99) == pytest.approx(0.1)
    assert learning_rate(plan, 550) == pytest.approx(0.1 * 0.51)
    assert learning_rate(plan, 1_000) == pytest.approx(0.002)


def test_episodes_grow_to_their_whole_length():
    plan = Recipe(first_length=7, growth=100)
    lengths = [episode_length(plan, 35, step) for step in (0, 50, 99, 100, 5_000)]
    assert lengths == [7, 21, 34, 35, 35]
    assert episode_length(Recipe(), 35, 0) == 35


def test_distilled_targets_cost_the_exact_entropy_and_sampled_ones_their_own_surprise():
    episodes = TASK.sample(50, torch.Generator().manual_seed(3))
    exact = TASK.predictive(episodes.tokens)
    output = torch.full((*exact.shape[:2], 8), -math.inf, dtype=torch.float64)
    output[..., 4:] = exact.nan_to_num(0.25).clamp(min=1e-30).log()
    output[..., :4] = -80.0
    where = episodes.targets >= 0
    entropy = float(TASK.entropy(episodes.tokens)[where].mean()) * math.log(2)
    assert float(objective(TASK, episodes, output, distilled=True)) == pytest.approx(entropy, abs=1e-12)
    surprise = -exact[where].gather(1, episodes.targets[where][:, None]).log().mean()
    assert float(objective(TASK, episodes, output, distilled=False)) == pytest.approx(float(surprise), abs=1e-12)


def test_the_paper_preset_is_the_papers_shape():
    paper = PRESETS["paper"]
    assert (paper.shape.layers, paper.shape.heads, paper.shape.width) == (6, 6, 192)
    assert (paper.learning_rate, paper.batch, paper.steps, paper.weight_decay, paper.clip) == (
        3e-4,
        256,
        50_000,
        0.1,
        1.0,
    )
    with pytest.raises(UnknownTunnel, match="tiny, small, paper, shipped"):
        recipe("coin", "huge")
    with pytest.raises(UnknownTunnel, match="no shipped recipe"):
        recipe("coin", "shipped")


def test_a_shortened_recipe_squeezes_its_whole_schedule():
    whole = Recipe(steps=7_000, warm_up=200, growth=2_000, learning_rate=3e-3)
    short = shortened(whole, 0.1)
    assert (short.steps, short.warm_up, short.growth) == (700, 20, 200)
    assert replace(short, steps=7_000, warm_up=200, growth=2_000) == whole
    for wrong in (0.0, 1.5):
        with pytest.raises(ValueError, match="share of the steps"):
            shortened(whole, wrong)


def test_recorded_controls_say_where_each_fails():
    for name in shipped_names():
        table, card = recorded_controls(MODELS / name), load_card(MODELS / name)
        if name in TASKS and table is None:
            continue  # the controls of its task stand beside the model that bears the task's name
        assert sorted(table.index) == sorted(KINDS), name
        assert (table["steps"] == card["recipe"]["steps"]).all(), name
        assert ((table["parameters"] - card["parameters"]).abs() <= 0.02 * card["parameters"]).all(), name
    assert recorded_controls(MODELS) is None
    asked = [2, 4, 6, 8, 10]
    assert ranges(asked, []) == "nowhere"
    assert ranges(asked, asked) == "everywhere"
    assert ranges(asked, [2, 4, 8]) == "2–4, 8"


@pytest.mark.parametrize("kind", KINDS)
def test_a_control_has_the_transformers_size_within_two_per_cent_and_no_look_ahead(kind):
    task = Bijection(symbols=12, pairs=18, repeats=0.5)
    parameters = parameter_count(build(Shape("gpt2", 2, 4, 96), task, 0))
    model = control(kind, task, parameters, seed=0)
    assert abs(parameter_count(model) - parameters) <= 0.02 * parameters
    tokens = task.sample(2, torch.Generator().manual_seed(0)).tokens
    changed = tokens.clone()
    changed[:, 9:] = task.sample(2, torch.Generator().manual_seed(1)).tokens[:, 9:]
    before, after = called(model, tokens), called(model, changed)
    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert before.shape == (2, 35, 24)
    earlier = tokens.clone()
    earlier[:, 1] = (tokens[:, 1] - 11) % 12 + 12
    sees_the_past = not torch.allclose(called(model, earlier)[:, 8], before[:, 8])
    assert sees_the_past == (kind != "per-position MLP")


def test_the_best_of_several_rates_is_kept_and_the_per_position_floor_is_the_uniform_row():
    """Nothing but the key in view: such a network answers uniformly, two bits from a known value among four."""
    wider = replace(TINY, shape=Shape("gpt2", 2, 2, 64), steps=60)
    models, runs = train_controls(TASK, wider, kinds=("per-position MLP",), rates=(1e-5, 3e-3))
    assert runs["learning_rate"].tolist() == [1e-5, 3e-3]
    figures = calibrate(TASK, {}, sequences=256)
    episodes = held_out(TASK, 256)
    rows = model_rows(models["per-position MLP"], episodes.tokens, TASK.outcomes, called)
    judged = table(TASK, {"control": rows}, episodes)
    assert judged.loc["control", "kl"] >= figures.loc["uniform", "kl"] - 0.01
    final, _ = train_controls(TASK, wider, kinds=("per-position MLP",), rates=(3e-3,))
    assert same_weights(models["per-position MLP"], final["per-position MLP"])
