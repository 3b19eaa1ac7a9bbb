"""How to name a run in a paper: what it is, what made it, and the work that the numbers rest on."""

from __future__ import annotations

from typing import Any

PAPER = """@misc{gradientdynamics2025,
  title = {Gradient Dynamics of Attention: How Cross-Entropy Sculpts Bayesian Manifolds},
  year = {2025},
  eprint = {2512.22473},
  archivePrefix = {arXiv}
}"""


def citation(record: dict[str, Any]) -> str:
    """A sentence for the methods section, and BibTeX of the software and of the paper whose laws it computes."""
    versions = record.get("versions", {})
    texts = record.get("texts", [])
    sentence = (
        f"Attention heads of {record.get('model')} ({record.get('architecture')}, {record.get('dtype')}, "
        f"{record.get('attention_implementation')} attention) were measured with advantage-probe "
        f"{record.get('advantage_probe')} on {record.get('targets')} targets in {record.get('windows')} windows of "
        f"{', '.join(texts) or 'text'} (digest {record.get('texts_digest')}); loss: {record.get('loss_kind')}, "
        f"{record.get('loss_unit')}; torch {versions.get('torch')}, transformers {versions.get('transformers')}. "
        "Intervals are 95 % Poisson-bootstrap intervals over windows."
    )
    software = (
        "@software{advantageprobe,\n"
        "  title = {Advantage Probe},\n"
        f"  version = {{{record.get('advantage_probe')}}}\n"
        "}"
    )
    return f"{sentence}\n\n{software}\n\n{PAPER}"
