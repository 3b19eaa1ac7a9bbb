"""How models are trained: three presets by size, and one tuned recipe for each shipped model."""

from dataclasses import dataclass, field, replace

from ..errors import UnknownTunnel
from .models import Shape


@dataclass(frozen=True)
class Recipe:
    """Everything that decides a run, besides the tunnel. Learning rate: linear warm-up, then cosine to a fiftieth.

    Episodes may start short: their length grows from `first_length` to the tunnel's own over `growth` steps, with more
    of them in a batch so that a step sees as many tokens. Binding is learnt from short episodes far sooner than from
    long ones.
    """

    shape: Shape = field(default_factory=Shape)
    steps: int = 2_000
    batch: int = 64
    learning_rate: float = 1e-3
    warm_up: int = 100
    weight_decay: float = 0.01
    clip: float = 1.0
    first_length: int = 0
    growth: int = 0
    distilled: bool = False
    seed: int = 0


PRESETS = {
    "tiny": Recipe(Shape("gpt2", 2, 4, 64), steps=1_500),
    "small": Recipe(Shape("gpt2", 4, 4, 128), steps=10_000, batch=128, warm_up=500),
    # Six layers of six heads and width 192 with the papers' optimiser, for a GPU.
    "paper": Recipe(
        Shape("gpt2", 6, 6, 192), steps=50_000, batch=256, learning_rate=3e-4, warm_up=2_000, weight_decay=0.1
    ),
}

SHIPPED = {
    "bijection-repeats": Recipe(Shape("llama", 2, 4, 96), steps=7_000, warm_up=200, first_length=7, growth=2_000),
    "mess3": Recipe(Shape("gpt2", 4, 4, 64), steps=6_000, batch=128, warm_up=200),
    "rrxor": Recipe(Shape("gpt2", 4, 4, 64), steps=9_000, batch=128, warm_up=200),
    "selection": Recipe(
        Shape("llama", 3, 4, 96), steps=10_000, warm_up=200, distilled=True, first_length=8, growth=1_000
    ),
    "bijection-distinct": Recipe(Shape("llama", 2, 4, 96), steps=5_000, warm_up=200, first_length=7, growth=1_000),
    "hmm": Recipe(Shape("llama", 3, 4, 96), steps=7_000, warm_up=200, distilled=True, first_length=20, growth=1_500),
    # The same task at four layers: does depth turn what two layers count into an entropy?
    "bijection-repeats-4": Recipe(Shape("llama", 4, 4, 96), steps=4_000, warm_up=114, first_length=7, growth=1_143),
}
TASKS = {"bijection-repeats-4": "bijection-repeats"}  # models whose name is not their tunnel's


def task_of(name: str) -> str:
    """The tunnel that the shipped model `name` was trained on."""
    return TASKS.get(name, name)


def shortened(recipe: Recipe, share: float) -> Recipe:
    """The same recipe with its whole schedule squeezed into a `share` of the steps, in (0, 1]."""
    if not 0 < share <= 1:
        raise ValueError(f"a share of the steps lies in (0, 1], not {share}")
    squeezed = {key: round(getattr(recipe, key) * share) for key in ("steps", "warm_up", "growth")}
    return replace(recipe, **squeezed)


# Presets and recipes that must keep rotary positions whatever the size.
ROTARY = ("hmm",)


def recipe(name: str, preset: str) -> Recipe:
    """The recipe of tunnel `name` under `preset`: tiny, small, paper or shipped; raises `UnknownTunnel` with the
    choices.
    """
    if preset == "shipped":
        if name not in SHIPPED:
            raise UnknownTunnel(f"no shipped recipe for {name!r}: choose --preset {', '.join(PRESETS)}")
        return SHIPPED[name]
    if preset not in PRESETS:
        raise UnknownTunnel(f"no preset is named {preset!r}: choose {', '.join((*PRESETS, 'shipped'))}")
    chosen = PRESETS[preset]
    if name in ROTARY:
        chosen = replace(chosen, shape=replace(chosen.shape, family="llama"), distilled=True)
    return chosen
