"""Which linear maps make a head's keys and read its output, found by the numbers and not by their names.

Fused projections keep query, key and value in a dozen orders: side by side (GPT-2, Phi-3), head by head (GPT-NeoX,
BLOOM), group by group (Falcon), in pieces for devices long gone (CodeGen). A table of orders goes stale; so the model is
run on many one-token sequences, where rotary embeddings turn by nothing, and every component of the keys that the kernel
is given is looked up among the outputs of the module's linear layers. What is not found there is refused.

Shapes: B sequences, K key/value heads, H query heads, D head width, V value width, M width of the residual stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...hooks.attach import calls
from ...hooks.call import AttentionCall
from ...hooks.errors import BadRequest, NoAttentionSeen, UnsupportedFamily
from ...hooks.site import Site

PROBES = 48  # one-token sequences: enough that two columns never agree by chance
TOLERANCE = 1e-3  # of a column's size: low precision rounds, a wrong column is off by its whole size
_KEYS = ("k_proj", "key", "k", "k_lin", "to_k", "key_proj", "wk", "k_attn")


@dataclass(frozen=True, eq=False)
class KeyMap:
    """W_K of one module: weight (K,D,M), row d of head k makes component d of its key; `normalised`: a norm or a
    factor follows, so that the layout was taken from the layer's name; `linear` names the layer.
    """

    site: Site
    linear: str
    weight: Tensor
    normalised: bool


@dataclass(frozen=True, eq=False)
class OutputMap:
    """W_O of one module: weight (H,V,M); a head's output (V,) times its part is what the layer `linear` makes of it.

    `norm`: the module that norms this before it joins the residual stream (Gemma 2, OLMo 2), None where nothing does.
    """

    site: Site
    linear: str
    weight: Tensor
    norm: str | None


@dataclass(frozen=True, eq=False)
class Unembedding:
    """weight (vocabulary, M), and the name of the norm before it, None where there is none."""

    weight: Tensor
    norm: str | None


@dataclass(eq=False)
class _Looker:
    """Keeps keys and outputs of every module's first call."""

    keys: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    sites: dict[str, Site] = field(default_factory=dict)

    def look(self, call: AttentionCall) -> None:
        name = call.site.module
        if name not in self.keys:
            self.keys[name], self.outputs[name] = call.key[:, :, 0].detach(), call.output[:, :, 0].detach()
            self.sites[name] = call.site


def _matrix(module: nn.Module) -> Tensor | None:
    """(out, in) weight of a linear layer, None for any other module."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or isinstance(module, nn.Embedding):
        return None
    if type(module).__name__ == "Conv1D":  # of transformers: (in, out)
        return weight.detach().T
    return weight.detach() if isinstance(module, nn.Linear) else None


def _norms(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower() and not any(True for _ in module.children())


@contextmanager
def _listening(model: nn.Module, note: Callable[[str, Tensor, Tensor], None]) -> Iterator[None]:
    """Every linear layer and every norm tells its input and output."""
    handles = []

    def hook(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def told(module: nn.Module, given: Any, result: Any) -> None:
            if given and isinstance(given[0], Tensor) and isinstance(result, Tensor):
                note(name, given[0].detach(), result.detach())

        return told

    try:
        for name, module in model.named_modules():
            if _matrix(module) is not None or _norms(module):
                handles.append(module.register_forward_hook(hook(name)))
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True, eq=False)
class _Run:
    looker: _Looker
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]


def _run(model: nn.Module, count: int) -> _Run:
    """One-token sequences of different tokens through the model."""
    rows = int(model.get_input_embeddings().num_embeddings)  # type: ignore[operator]
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    ids = torch.randperm(rows, generator=generator)[: min(count, rows)][:, None].to(device)
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}

    def note(name: str, given: Tensor, result: Tensor) -> None:
        if name not in inputs and given.shape[0] == len(ids):
            inputs[name], outputs[name] = given.reshape(len(ids), -1), result.reshape(len(ids), -1)

    looker = _Looker()
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with calls(model, looker.look, forward=True), torch.no_grad(), _listening(model, note):
            model(input_ids=ids, use_cache=False)
    finally:
        for module in training:
            module.training = True
    if not looker.keys:
        raise NoAttentionSeen(f"{type(model).__name__} made no attention call that the probe can read.")
    return _Run(looker, inputs, outputs)


def _columns(wanted: Tensor, offered: Tensor) -> Tensor | None:
    """For every column of wanted (B,w) its place among the columns of offered (B,o); None when one is missing."""
    if offered.shape[1] < wanted.shape[1]:
        return None
    one, other = wanted.double(), offered.double()
    distance = torch.cdist(one.T, other.T, compute_mode="donot_use_mm_for_euclid_dist")
    nearest, place = distance.min(1)
    fits = nearest <= TOLERANCE * one.norm(dim=0).clamp(min=1e-12)
    return place if bool(fits.all()) and len(place.unique()) == len(place) else None


def key_maps(model: nn.Module, count: int = PROBES) -> list[KeyMap]:
    """W_K of every attention module of a causal language model, per key/value head, whatever layout it is kept in.

    Raises:
        UnsupportedFamily: where no linear layer of a module makes its keys (latent attention, or a norm behind a fused
            projection).
    """
    run = _run(model, count)
    modules = dict(model.named_modules())
    found = []
    for name, key in run.looker.keys.items():
        heads, width = key.shape[1:]
        wanted = key.flatten(1)
        near = [linear for linear in run.outputs if linear.startswith(f"{name}.") and not _norms(modules[linear])]
        for linear in near:
            place = _columns(wanted, run.outputs[linear])
            if place is not None:
                weight = _matrix(modules[linear])
                assert weight is not None
                found.append(KeyMap(run.looker.sites[name], linear, weight[place].unflatten(0, (heads, width)), False))
                break
        else:
            found.append(_named(run.looker.sites[name], near, modules, heads, width))
    return found


def _named(site: Site, near: list[str], modules: dict[str, nn.Module], heads: int, width: int) -> KeyMap:
    """The map of a layer that is named after keys and makes nothing else, where a norm changes what it makes."""
    for linear in near:
        weight = _matrix(modules[linear])
        if linear.rsplit(".", 1)[-1] in _KEYS and weight is not None and weight.shape[0] == heads * width:
            return KeyMap(site, linear, weight.unflatten(0, (heads, width)), True)
    raise UnsupportedFamily(
        f"{site.module}: no linear layer makes the keys that its kernel is given (tried {', '.join(near) or 'none'}), so "
        "W_K cannot be told apart per head."
    )


def output_maps(model: nn.Module, count: int = PROBES) -> list[OutputMap]:
    """W_O of every attention module: the linear layer whose input is the heads' outputs side by side.

    Raises:
        UnsupportedFamily: where a gate or a norm comes in between, or nothing reads the heads.
    """
    run = _run(model, count)
    modules = dict(model.named_modules())
    found = []
    for name, output in run.looker.outputs.items():
        heads, width = output.shape[1:]
        flat = output.flatten(1)
        for linear, given in run.inputs.items():
            same = linear.startswith(f"{name}.") and given.shape == flat.shape and not _norms(modules[linear])
            if same and torch.allclose(given.double(), flat.double(), rtol=1e-3, atol=1e-6):
                weight = _matrix(modules[linear])
                assert weight is not None
                part = weight.T.unflatten(0, (heads, width))
                found.append(OutputMap(run.looker.sites[name], linear, part, _normed_next(run, modules, linear)))
                break
        else:
            raise UnsupportedFamily(
                f"{name}: no linear layer reads the heads' outputs as they are (a gate or norm may come in between)."
            )
    return found


def _normed_next(run: _Run, modules: dict[str, nn.Module], linear: str) -> str | None:
    """The norm whose input is exactly what a linear layer made."""
    made = run.outputs[linear]
    for name, given in run.inputs.items():
        if _norms(modules[name]) and given.shape == made.shape and torch.equal(given, made):
            return name
    return None


def unembedding(model: nn.Module, count: int = PROBES) -> Unembedding:
    """The unembedding of a causal language model and the norm before it.

    Raises:
        UnsupportedFamily: where the model names no output embedding.
    """
    last = model.get_output_embeddings()  # type: ignore[operator]
    if last is None or _matrix(last) is None:
        raise UnsupportedFamily(
            f"{type(model).__name__} names no unembedding, so nothing can be read in its vocabulary."
        )
    modules = dict(model.named_modules())
    run = _run(model, count)
    name = next(name for name, module in modules.items() if module is last)
    given = run.inputs[name]
    norm = None
    for other, made in run.outputs.items():
        if _norms(modules[other]) and made.shape == given.shape and torch.equal(made, given):
            norm = other
    weight = _matrix(last)
    assert weight is not None
    return Unembedding(weight, norm)


def chosen(maps: list[Any], layer: int) -> Any:
    """The map of a layer.

    Raises:
        BadRequest: when there is none.
    """
    for entry in maps:
        if entry.site.layer == layer:
            return entry
    raise BadRequest(f"There is no attention in layer {layer}; layers: {[entry.site.layer for entry in maps]}.")
