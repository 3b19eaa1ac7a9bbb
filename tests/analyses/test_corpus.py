"""How long a text a model takes at once."""

import pytest
import torch
from transformers import RobertaConfig, RobertaForCausalLM

from advantage_probe.analyses.inputs.corpus import context_of


def test_a_family_that_counts_positions_from_its_padding_id_has_a_shorter_context() -> None:
    """RoBERTa's table of 12 positions holds 10 tokens when the padding id is 1: the longest window that runs."""
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = RobertaConfig(vocab_size=20, **sizes, max_position_embeddings=12, pad_token_id=1, is_decoder=True)
    model = RobertaForCausalLM(config).eval()
    length = context_of(model)
    assert length == 10
    model(input_ids=torch.full((1, length), 5))
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=torch.full((1, length + 1), 5))
