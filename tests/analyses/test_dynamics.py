"""Frame, precision and order: hand-made curves with known times, runs that repeat themselves, wording by the rule."""

from __future__ import annotations

import json
import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.text import Text
from scipy import stats
from terminal import command, refused

from advantage_probe.analyses.dynamics import attention_calls, course, frame, pictures, real_steps, roles
from advantage_probe.analyses.dynamics import examined as dynamics
from advantage_probe.analyses.dynamics import report as dynamics_report
from advantage_probe.analyses.inputs import precision
from advantage_probe.analyses.pictures import figures
from advantage_probe.analyses.wind_tunnels.training.models import Shape, logits
from advantage_probe.analyses.wind_tunnels.training.recipes import Recipe
from advantage_probe.hooks.errors import BadInput, BadRequest

STEPS = 40


def tiny(seed: int = 0) -> course.Course:
    recipe = Recipe(Shape("llama", 2, 2, 16), steps=STEPS, batch=4, warm_up=5, seed=seed)
    return course.Course("bijection-repeats", recipe, {"symbols": 4, "pairs": 5})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two finished runs."""
    folder = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        course.train(tiny(seed), folder / f"seed-{seed}")
    return folder


@pytest.fixture(scope="module")
def examined(folder: Path) -> list[dynamics.Examined]:
    """One run, and the same under another seed's name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamics, "SEQUENCES", 16)
        patch.setattr(dynamics, "HELD_OUT", 4)
        patch.setattr(dynamics, "KINDS", ("own",))
        one = dynamics.examine(folder / "seed-0")
    return [one, replace(one, course=tiny(1))]


# -- frame -------------------------------------------------------------------------------------------------------------


def test_divergence_is_scipys() -> None:
    from scipy.spatial.distance import jensenshannon

    generator = torch.Generator().manual_seed(0)
    one, other = (torch.rand(3, 2, 4, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    one, other = one / one.sum(-1, keepdim=True), other / other.sum(-1, keepdim=True)
    expected = jensenshannon(one.numpy(), other.numpy(), axis=-1) ** 2
    assert frame.divergence(one, other).numpy() == pytest.approx(expected.mean((0, 2)))
    certain = torch.eye(2).expand(1, 1, 2, 2)
    assert float(frame.divergence(certain, certain.flip(-1))) == pytest.approx(math.log(2))


def test_two_runs_that_differ_by_the_order_of_their_heads_do_not_differ() -> None:
    generator = torch.Generator().manual_seed(0)
    maps = torch.rand(3, 6, 4, 4, generator=generator, dtype=torch.float64).softmax(-1)
    shuffled = torch.cat((maps[:, [2, 0, 1]], maps[:, [4, 5, 3]]), 1)
    assert frame.between_seeds(maps, shuffled, layers=2) == pytest.approx(0.0, abs=1e-12)
    crossed = torch.cat((maps[:, 3:], maps[:, :3]), 1)  # heads of another layer are no match
    assert frame.between_seeds(maps, crossed, layers=2) > 1e-4


def test_one_curve_has_two_times_by_scale() -> None:
    steps = list(range(101))
    values = [10 ** (-4 * step / 100) for step in steps]  # four decades in a hundred steps
    assert frame.t90(steps, values) == 25  # 10^(-4t) ≤ .1 + .9e-4 just before a tenth: step 25
    assert frame.t90(steps, values, log=True) == 90


def test_a_distance_to_the_end_reads_its_last_value_above_zero_on_a_log_scale() -> None:
    assert frame.t90([0, 1, 2, 3], [1.0, 0.5, 0.01, 0.0], log=True) == 2
    assert frame.t90([0, 1, 2, 3], [1.0, 0.5, 0.01, 0.0]) == 2
    assert math.isnan(frame.t90([0, 1], [1.0, 2.0]))


def test_at_least_forty_checkpoints_and_halves_and_quarters_among_them() -> None:
    for steps in (640, 1_500, 7_000):
        found = frame.log_spaced(steps)
        assert 40 <= len(found) <= 60
        assert {0, 1, steps, steps // 2, steps // 4} <= set(found)
        large = np.log([step for step in found if step > 40])
        assert np.diff(large).max() < 0.25
    assert frame.log_spaced(10) == list(range(11))


# -- runs --------------------------------------------------------------------------------------------------------------


def test_a_continuation_with_nothing_frozen_is_the_run_bit_for_bit(folder: Path) -> None:
    run = folder / "seed-0"
    end = course.state(run, STEPS)["model"]
    again = course.continued(run, 20, ()).model.state_dict()
    assert all(torch.equal(again[name], end[name]) for name in end)
    other = course.continued(run, 20, roles.ROUTING).model
    start = course.runner_of(tiny(), course.state(run, 20)).model
    old = dict(start.named_parameters())
    for name, parameter in other.named_parameters():
        assert torch.equal(parameter, old[name]) == ("q_proj" in name or "k_proj" in name)


def test_a_killed_run_goes_on_to_the_same_end(folder: Path, tmp_path: Path) -> None:
    class Killed(Exception):
        pass

    left = [25]

    def tick() -> None:
        left[0] -= 1
        if not left[0]:
            raise Killed

    with pytest.raises(Killed):
        course.train(tiny(), tmp_path / "run", tick)
    with pytest.raises(BadInput, match="no finished run"):
        course.load(tmp_path / "run")
    with pytest.raises(BadInput, match="another run that was not finished"):
        course.train(tiny(seed=7), tmp_path / "run")
    course.train(tiny(), tmp_path / "run")
    end, expected = (course.state(path, STEPS)["model"] for path in (tmp_path / "run", folder / "seed-0"))
    assert all(torch.equal(end[name], expected[name]) for name in end)
    with pytest.raises(BadInput, match="another run"):
        course.train(tiny(seed=7), tmp_path / "run")


def test_the_run_is_torchs_own_training(folder: Path) -> None:
    wanted = tiny()
    model, task = wanted.fresh(), wanted.task
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.01},
            {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=1e-3,
    )
    for step in range(2):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (step + 1) / 5
        episodes = task.sample(4, torch.Generator().manual_seed(step))
        episodes.loss(logits(model, episodes.tokens)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    saved = course.state(folder / "seed-0", 2)["model"]
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(saved[name], parameter.detach(), rtol=1e-5, atol=1e-7)


def test_the_real_step_is_the_step_that_the_run_took(folder: Path) -> None:
    run = folder / "seed-0"
    found = real_steps.real_step(tiny(), course.state(run, 4))
    old, new = (course.state(run, step)["model"] for step in (4, 5))
    for name, change in found.change.items():
        torch.testing.assert_close(change, (new[name].double() - old[name].double()), rtol=0, atol=0)
    assert found.number == 4


def test_other_optimizers_take_their_own_steps(folder: Path) -> None:
    saved = course.state(folder / "seed-0", 8)
    own = real_steps.real_step(tiny(), saved)
    length = sum(float(change.square().sum()) for change in own.change.values()) ** 0.5
    sgd = real_steps.real_step(tiny(), saved, "sgd", warm=0)
    sgd.before.zero_grad()
    sgd.loss(sgd.before).backward()
    slope = torch.cat([p.grad.flatten() for p in sgd.before.parameters() if p.grad is not None])
    moved = torch.cat([sgd.change[name].flatten() for name, p in sgd.before.named_parameters() if p.grad is not None])
    assert float(torch.nn.functional.cosine_similarity(moved, -slope, dim=0)) == pytest.approx(1.0, abs=1e-5)
    assert float(moved.norm()) == pytest.approx(length, rel=1e-3)
    adam = real_steps.real_step(tiny(), saved, "adam", warm=0)
    rate = saved["optimizer"]["param_groups"][0]["lr"]
    first = adam.change["model.layers.0.self_attn.v_proj.weight"].abs()
    assert float(first.median()) == pytest.approx(rate, rel=0.02)  # Adam's first step is its rate in every entry
    muon = real_steps.real_step(tiny(), saved, "muon", warm=0)
    sizes = torch.linalg.svdvals(muon.change["model.layers.0.self_attn.v_proj.weight"])
    assert float(sizes[0] / sizes[8]) < 4  # orthogonalised: its directions are about equally long


def test_excess_is_the_divergence_from_bayes_of_the_whole_vocabulary() -> None:
    wanted = tiny()
    model, task, episodes = wanted.fresh().eval(), wanted.task, wanted.fixed(8)
    exact = task.predictive(episodes.tokens)
    rows = logits(model, episodes.tokens).detach().double().log_softmax(-1).numpy()
    total, count = 0.0, 0
    for place in np.ndindex(*episodes.tokens.shape):
        truth = exact[place].numpy()
        if np.isnan(truth).any():
            continue
        count += 1
        total += sum(p * (math.log(p) - rows[place][task.outcomes[i]]) for i, p in enumerate(truth) if p > 0)
    assert course.excess(model, task, episodes) == pytest.approx(total / count)


# -- examined ----------------------------------------------------------------------------------------------------------


def test_the_frame_starts_at_one_and_ends_at_nothing_in_every_cut(examined: list[dynamics.Examined]) -> None:
    curve = examined[0].checkpoints.set_index("step")
    for cut, end in (("whole", 40), ("half", 20), ("quarter", 10)):
        column = curve[f"frame_{cut}"]
        assert column[0] == 1
        assert column[end] == pytest.approx(0, abs=1e-12)
        assert column[column.index > end].isna().all()
        assert set(examined[0].times[cut]) == {"frame_linear", "frame_log", "precision_linear", "precision_log"}


def test_pressures_are_the_laws_own(examined: list[dynamics.Examined], folder: Path) -> None:
    wanted = tiny()
    runner = course.runner_of(wanted, course.state(folder / "seed-0", 10))
    loss = dynamics.summed(wanted.task, wanted.fixed(16))
    found = attention_calls.heads(precision.double(runner.model), loss)
    table = examined[0].pressures
    for layer, head in enumerate(found.values()):
        for place in range(2):
            own = table[(table["step"] == 10) & (table["layer"] == layer) & (table["head"] == place)].iloc[0]
            rows = head.attention.shape[0] * head.attention.shape[2]
            routing = float(head.score_gradient[:, place].norm()) / rows**0.5
            content = float(head.value_gradient[:, place].norm()) / rows**0.5
            rms = float(head.value[:, place].square().sum(-1).mean().sqrt())
            assert own["routing_pressure"] == pytest.approx(routing, rel=1e-3)
            assert own["content_relative"] == pytest.approx(content * rms, rel=1e-3)
            assert own["ratio"] == pytest.approx(routing / (content * rms), rel=1e-3)


def test_the_price_of_freezing_is_what_a_second_training_pays(examined: list[dynamics.Examined], folder: Path) -> None:
    wanted = tiny()
    ends = [course.continued(folder / "seed-0", 4, frozen).model for frozen in ((), roles.CONTENT)]
    free, frozen = (course.excess(model, wanted.task, wanted.fixed(16)) for model in ends)
    table = examined[0].causal
    own = table[(table["step"] == 4) & (table["frozen"] == "content")].iloc[0]
    assert own["cost"] == pytest.approx(frozen - free, abs=1e-9)
    assert len(table) == 2 * len(set(wanted.forks))


def test_the_object_and_the_files_are_whole(examined: list[dynamics.Examined], tmp_path: Path) -> None:
    found = dynamics_report.summary(examined)
    assert found["seeds"] == [0, 1]
    assert found["checkpoints"] >= 40
    assert [fork["percent"] for fork in found["causal"]] == [2, 5, 10, 20, 50]
    assert "cannot be told from 2 runs" in found["wording"]
    assert len(found["divergence_between_seeds"]) == 1
    assert "law-following" in dynamics_report.text(examined)
    dynamics_report.write(examined, tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    tables = ("checkpoints", "pressures", "following", "feedback", "steps", "causal")
    assert names == {"run.json"} | {f"dynamics.{end}" for end in ("png", "svg", "pdf", "csv", "txt")} | {
        f"{table}.{end}" for table in tables for end in ("csv", "parquet")
    }


def test_the_picture_shows_every_run_and_the_mean_of_them(examined: list[dynamics.Examined], tmp_path: Path) -> None:
    one, other = examined
    moved = other.causal.assign(cost=other.causal["cost"] + 0.2)
    data = dynamics_report.drawn([one, replace(other, causal=moved)])
    drawing = pictures.figure(data, between=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a layout that finds no room says so by a warning
        drawing.savefig(tmp_path / "drawn.png")
    sizes = [text.get_fontsize() for text in drawing.findobj(Text) if text.get_text().strip()]
    assert drawing.get_figwidth() == figures.PAGE
    assert min(sizes) >= 7
    assert max(sizes) <= 8
    linear = drawing.axes[0].lines[0]
    np.testing.assert_allclose(linear.get_ydata(), one.checkpoints["frame_whole"])
    price = drawing.axes[3]
    rings = [bars[0].get_ydata() for bars in price.containers]
    for frozen, ring in zip(("routing", "content"), rings, strict=True):
        own = one.causal[one.causal["frozen"] == frozen].sort_values("step")["cost"].to_numpy()
        np.testing.assert_allclose(ring, own + 0.1)
    bars = price.containers[0].lines[2][0].get_segments()
    half = stats.t.ppf(0.975, 1) * np.std([0, 0.2], ddof=1) / 2**0.5
    np.testing.assert_allclose([segment[1, 1] - segment[0, 1] for segment in bars], 2 * half)
    alone = dynamics_report.drawn([replace(one, causal=one.causal.iloc[:0])])
    assert "no continuations" in pictures.figure(alone).axes[3].texts[0].get_text()


# -- the wording -------------------------------------------------------------------------------------------------------


def forks_with(counts: list[int], runs: int = 5) -> list[dict[str, Any]]:
    """What `causal` makes of runs in which routing was the cheaper to freeze `counts` times, by a little."""
    made = []
    for seed in range(runs):
        rows = []
        for fork, count in zip(tiny().forks, counts, strict=True):
            rows.append({"step": fork, "frozen": "routing", "excess": 0.0, "cost": 0.1 if seed < count else 0.3})
            rows.append({"step": fork, "frozen": "content", "excess": 0.0, "cost": 0.2})
        empty = pd.DataFrame()
        made.append(
            dynamics.Examined(
                tiny(seed), empty, empty, {}, 1.0, torch.empty(0), empty, empty, empty, pd.DataFrame(rows)
            )
        )
    return dynamics_report.causal(made)


@pytest.mark.parametrize(
    ("counts", "runs", "said"),
    [
        ([5, 4, 4, 5, 5], 5, "Frame first: freezing routing cost less"),
        (
            [5, 4, 3, 0, 5],
            5,
            "not written of these runs: freezing routing cost less than freezing content at 2 % (5 of 5)",
        ),
        ([5, 4, 3, 0, 5], 5, "but not at 10 % (3 of 5), 20 % (0 of 5)."),
        (
            [3, 3, 3, 3, 3],
            5,
            "“Frame first” is not written of these runs: freezing routing cost less than freezing content in",
        ),
        ([4, 4, 4, 4, 4], 4, "cannot be told from 4 runs"),
        ([8, 8, 8, 8, 8], 10, "Frame first: "),
        (
            [7, 7, 7, 7, 7],
            10,
            "“Frame first” is not written of these runs: freezing routing cost less than freezing content in",
        ),
    ],
)
def test_frame_first_is_written_only_by_the_rule(counts: list[int], runs: int, said: str) -> None:
    assert said in dynamics_report.wording(forks_with(counts, runs))


def test_without_continuations_nothing_is_said_of_order() -> None:
    assert "is not said" in dynamics_report.wording([])


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command_examines_kept_runs(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(dynamics, "SEQUENCES", 8)
    monkeypatch.setattr(dynamics, "HELD_OUT", 4)
    monkeypatch.setattr(dynamics, "KINDS", ("own",))
    out = tmp_path / "report"
    result = command("dynamics", "--checkpoints", folder / "seed-0", "--no-causal", "--json", "--out", out)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["causal"] == []
    assert (out / "dynamics.png").is_file()


def test_the_command_trains_keeps_and_examines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(dynamics, "SEQUENCES", 8)
    monkeypatch.setattr(dynamics, "HELD_OUT", 4)
    monkeypatch.setattr(dynamics, "KINDS", ("own",))
    small = replace(tiny(), recipe=replace(tiny().recipe, growth=0))
    monkeypatch.setattr(dynamics, "SMALL", small)
    result = command("dynamics", "--seeds", "3", "--steps", "40", "--no-causal", "--keep", tmp_path / "kept")
    assert result.returncode == 0, result.stderr
    assert "law-following" in result.stdout
    assert course.load(tmp_path / "kept" / "seed-3").recipe.seed == 3


def test_bad_input_is_one_sentence(folder: Path, tmp_path: Path) -> None:
    refused(command("dynamics", "--checkpoints", tmp_path), "holds no run")
    refused(command("dynamics", "--checkpoints", folder, "--steps", "50"), "leave --keep")
    refused(command("dynamics", "--steps", "3"), "40 or more")
    refused(command("dynamics", "--tunnel", "nowhere"), "nowhere")
    refused(command("dynamics", "--seeds", "1,1"), "differ")


def test_a_torn_checkpoint_and_a_foreign_run_are_refused_by_name(folder: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(folder, tmp_path / "runs")
    (tmp_path / "runs" / "seed-0" / "step-0000004.pt").write_bytes(b"torn")
    refused(command("dynamics", "--checkpoints", tmp_path / "runs" / "seed-0"), "step-0000004.pt")
    record = tmp_path / "runs" / "seed-1" / "course.json"
    record.write_text(record.read_text(encoding="utf-8").replace('"batch": 4', '"batch": 5'), encoding="utf-8")
    refused(command("dynamics", "--checkpoints", tmp_path / "runs"), "more than their seed")


def test_courses_shorten_and_refuse() -> None:
    one, other = dynamics.courses("coin", (1, 2), 60)
    assert (one.tunnel, one.recipe.steps, other.recipe.seed) == ("coin", 60, 2)
    with pytest.raises(BadRequest):
        dynamics.courses("", (-1,), None)
