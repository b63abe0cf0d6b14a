"""Heads of every family, against the model's own logits, and what is refused. More is in test_exactness.py."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from nemo_rl.models.policy.batch.row_layout import ModelBatch, RowLayout
from nemo_rl.models.policy.head.logprobs import LogprobModel, logit_transform
from nemo_rl.models.policy.head.tasks import Logprobs
from nemo_rl.types import SamplingParams
from tests.unit.policy.models import SHAPE, VOCAB, perturb

SMALL = SHAPE | {"hidden_size": 32, "intermediate_size": 48, "head_dim": 8}
WARM = SamplingParams(max_new_tokens=0, temperature=0.7)


def small_model(family: str, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SMALL | changes)).eval()
    perturb(model, 0.1)
    return model


def plain_logprobs(model: PreTrainedModel, batch: ModelBatch) -> torch.Tensor:
    """From the model's own logits."""
    logits = model(input_ids=batch.input_ids, use_cache=False).logits / WARM.temperature
    logprobs = logits.log_softmax(-1)[:, :-1].gather(-1, batch.input_ids[:, 1:, None])[..., 0]
    scored = torch.zeros(batch.shape).index_put((batch.rows, batch.positions), torch.ones(len(batch.rows)))
    return torch.cat([torch.zeros(batch.shape[0], 1), logprobs], dim=1) * scored


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
    hf, random = small_model(family, **HEADS[family]), torch.Generator().manual_seed(1)
    rows = [(torch.randint(2, VOCAB, (n,), generator=random), torch.rand(n, generator=random) < 0.6) for n in (7, 9)]
    batch = RowLayout(padding_free=False).build(rows)
    with torch.no_grad():
        states = hf.base_model(input_ids=batch.input_ids, use_cache=False).last_hidden_state
        got = LogprobModel(hf, WARM).score(states, batch, Logprobs())
        assert (got - plain_logprobs(hf, batch)).abs().max() < 2e-6


def test_an_architecture_with_another_head_is_refused_by_name():
    config = AutoConfig.for_model("minicpm3", **SMALL)
    with pytest.raises(ValueError, match=r"'minicpm3' models change their logits by dim_model_base \(here 256\)"):
        logit_transform(config)
    with pytest.raises(ValueError, match=r"'qwen2' models change their logits by final_logit_softcapping"):
        logit_transform(AutoConfig.for_model("qwen2", **SMALL, final_logit_softcapping=5.0))
    changes = {"bos_token_id": 0, "eos_token_id": 1, "cls_token_id": 0, "sep_token_id": 1}
    modern = AutoModelForCausalLM.from_config(AutoConfig.for_model("modernbert-decoder", **SMALL | changes))
    with pytest.raises(ValueError, match=r"ModernBertDecoderForCausalLM: .* more than one linear layer \(lm_head\)"):
        LogprobModel(modern, WARM)
