"""Forks outside warm-up and growth, and what stays frozen in each arm."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
from scipy import stats

from advantage_probe.analyses.dynamics import course
from advantage_probe.analyses.dynamics.freezing import ARMS, Held, costs, forks, over_seeds, plain, repeats
from advantage_probe.analyses.wind_tunnels.training.models import Shape
from advantage_probe.analyses.wind_tunnels.training.runner import training_episodes
from advantage_probe.hooks.errors import BadRequest


def tiny(steps: int = 40) -> course.Course:
    recipe = replace(plain(0, steps).recipe, shape=Shape("llama", 1, 2, 16), batch=4, warm_up=4)
    return replace(plain(0, steps), recipe=recipe, changes={"symbols": 4, "pairs": 4})


def test_every_episode_has_its_whole_length() -> None:
    wanted = tiny()
    assert {training_episodes(wanted.task, wanted.recipe, step).tokens.shape[1] for step in (0, 3, 39)} == {7}


def test_a_fork_in_the_warm_up_or_in_the_growth_is_refused() -> None:
    assert forks(tiny()) == [4, 8, 20]
    with pytest.raises(BadRequest, match="before step 4"):
        forks(tiny(), (0.05,))
    growing = replace(tiny(), recipe=replace(tiny().recipe, growth=10))
    with pytest.raises(BadRequest, match="before step 10"):
        forks(growing)


def test_each_arm_freezes_its_own_numbers_and_no_others() -> None:
    for arm, (roles, embeddings) in ARMS.items():
        runner = course.runner_of(tiny())
        before = {name: tensor.clone() for name, tensor in runner.model.named_parameters()}
        held = Held(runner.model, roles, embeddings)
        for _ in range(3):
            runner.advance(held.restore)
        still = {name for name, tensor in runner.model.named_parameters() if torch.equal(tensor, before[name])}
        kinds = {"q_proj", "k_proj"} if arm.startswith("routing") else {"v_proj", "o_proj"}
        expected = {name for name in before if any(kind in name for kind in kinds)}
        expected |= {name for name in before if embeddings and "embed_tokens" in name}
        assert still == expected, arm


def test_nothing_frozen_repeats_the_run_and_costs_are_differences(tmp_path: Path) -> None:
    wanted = tiny()
    course.train(wanted, tmp_path / "run")
    assert repeats(tmp_path / "run", 8)
    table = costs(tmp_path / "run", [8])
    assert list(table["arm"]) == list(ARMS)
    assert (table["cost"] - (table["excess"] - table["unfrozen"])).abs().max() == 0
    assert (table["cost"] != 0).all()


def test_intervals_over_seeds_are_students() -> None:
    numbers = [0.1, 0.3, 0.2]
    table = pd.DataFrame({"share": 0.1, "arm": "content", "cost": numbers, "unfrozen": 0.01})
    found = over_seeds(table).iloc[0]
    low, high = stats.t.interval(0.95, 2, 0.2, stats.sem(numbers))
    assert (found["low"], found["high"]) == pytest.approx((low, high))
