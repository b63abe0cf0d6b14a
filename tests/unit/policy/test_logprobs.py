"""Logprobs of a model on micro-batches, against its own logits: heads of every family, and what is refused."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from nemo_rl.models.policy import attention
from nemo_rl.models.policy.batch.row_layout import ModelBatch, RowLayout
from nemo_rl.models.policy.head.logprobs import LogprobModel, logit_transform
from nemo_rl.models.policy.head.tasks import Logprobs
from nemo_rl.types import SamplingParams

SMALL = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
SMALL |= {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
WARM = SamplingParams(max_new_tokens=0, temperature=0.7)


def small_model(family: str, implementation: str | None = attention.ATTENTION, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SMALL, **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def batch_of(*lengths: int, mask: float = 0.6, padding_free: bool = True) -> ModelBatch:
    random = torch.Generator().manual_seed(1)
    sequences = [
        (torch.randint(2, 97, (length,), generator=random), torch.rand(length, generator=random) < mask)
        for length in lengths
    ]
    return RowLayout(padding_free=padding_free).build(sequences)


def plain_logprobs(model: PreTrainedModel, batch: ModelBatch, temperature: float) -> torch.Tensor:
    """From the model's own logits; `batch` is padded."""
    logits = model(input_ids=batch.input_ids, use_cache=False).logits / temperature
    logprobs = logits.log_softmax(-1)[:, :-1].gather(-1, batch.input_ids[:, 1:, None])[..., 0]
    scored = torch.zeros(batch.shape).index_put((batch.rows, batch.positions), torch.ones(len(batch.rows)))
    return torch.cat([torch.zeros(batch.shape[0], 1), logprobs], dim=1) * scored


@pytest.mark.parametrize(("tied", "padding_free"), [(True, True), (False, False)])
def test_a_models_logprobs_and_gradients_are_those_of_its_own_logits(tied, padding_free):
    hf = small_model("qwen2", tie_word_embeddings=tied)
    plain = copy.deepcopy(hf)
    want = plain_logprobs(plain, batch_of(11, 17, 5, padding_free=False), 0.7)
    (want * want.detach()).sum().backward()
    model = LogprobModel(hf, WARM, chunk_tokens=4)
    got = model(batch_of(11, 17, 5, padding_free=padding_free), Logprobs())
    (got * got.detach()).sum().backward()
    assert got.shape == (3, 17) and got.dtype == torch.float32
    assert (got - want).abs().max() < 2e-6
    for (name, parameter), reference in zip(hf.named_parameters(), plain.parameters(), strict=True):
        assert parameter.grad is not None and reference.grad is not None
        error = (parameter.grad - reference.grad).norm()
        assert error <= 3e-6 * max(1.0, reference.grad.norm().item()), name


def test_a_batch_without_scored_tokens_gives_zeros_and_gradients_of_zero():
    hf = small_model("qwen2")
    logprobs = LogprobModel(hf, WARM)(batch_of(4, 6, mask=0.0), Logprobs())
    assert torch.equal(logprobs, torch.zeros(2, 6))
    logprobs.sum().backward()
    for name, parameter in hf.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name


def test_unfiltered_logprobs_leave_out_top_k_and_top_p_but_not_the_temperature():
    hf, batch = small_model("qwen2"), batch_of(11, 17)
    with torch.no_grad():
        filtered = LogprobModel(hf, replace(WARM, top_k=3, top_p=0.5))
        plain = LogprobModel(hf, WARM)
        assert torch.equal(filtered(batch, Logprobs(filtered=False)), plain(batch, Logprobs()))
        got, want = filtered(batch, Logprobs()), plain(batch, Logprobs())
        assert (got >= want).all() and (got > want).any()


HEADS = {
    "gemma2": {"final_logit_softcapping": 3.0},
    "gemma3_text": {"final_logit_softcapping": 3.0},
    "granite": {"logits_scaling": 4.0},
    "cohere": {"logit_scale": 0.25},
    "hyperclovax": {"logits_scaling": 0.25},
    "phi": {},  # its head has a bias
}


@pytest.mark.parametrize("family", HEADS)
def test_what_a_family_does_to_its_logits_is_done_to_tiles(family):
    hf, batch = small_model(family, None, **HEADS[family]), batch_of(7, 9, padding_free=False)
    with torch.no_grad():
        states = hf.base_model(input_ids=batch.input_ids, use_cache=False).last_hidden_state
        got = LogprobModel(hf, WARM).score(states, batch, Logprobs())
        assert (got - plain_logprobs(hf, batch, 0.7)).abs().max() < 2e-6


def test_an_architecture_with_another_head_is_refused_by_name():
    config = AutoConfig.for_model("minicpm3", **SMALL)
    with pytest.raises(ValueError, match=r"'minicpm3' models change their logits by dim_model_base \(here 256\)"):
        logit_transform(config)
    with pytest.raises(ValueError, match=r"'qwen2' models change their logits by final_logit_softcapping"):
        logit_transform(AutoConfig.for_model("qwen2", **SMALL, final_logit_softcapping=5.0))
    changes = {"bos_token_id": 0, "eos_token_id": 1, "cls_token_id": 0, "sep_token_id": 1}
    modern = AutoModelForCausalLM.from_config(AutoConfig.for_model("modernbert-decoder", **{**SMALL, **changes}))
    with pytest.raises(ValueError, match=r"ModernBertDecoderForCausalLM: .* more than one linear layer \(lm_head\)"):
        LogprobModel(modern, WARM)
