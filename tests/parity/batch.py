"""The models and sequences on which our losses and TRL's are compared: tiny, random, made here, float32."""

import copy
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers import Qwen2ForSequenceClassification as Qwen2Classifier

from nemo_rl.data.tiny_model import build_tiny_tokenizer

NUM_PAIRS = 4
LONGEST_COMPLETION = 12


@dataclass(frozen=True)
class Sequence:
    """A prompt and what was answered; `mask` says which tokens of the answer carry loss."""

    prompt: list[int]
    completion: list[int]
    mask: list[int]

    @property
    def ids(self) -> list[int]:
        return self.prompt + self.completion

    @property
    def token_mask(self) -> list[int]:
        return [0] * len(self.prompt) + self.mask


@dataclass(frozen=True)
class Batch:
    """Eight sequences, which are four pairs: even ones chosen, odd ones rejected, on the same prompt."""

    sequences: list[Sequence]
    advantages: Tensor  # [8]
    margins: Tensor  # [4]
    noise: list[Tensor]  # per sequence [T]: previous logprobs minus those of the policy


@lru_cache
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tiny_tokenizer()


def _config(num_labels: int | None) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=len(tokenizer()),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.1,  # logits that differ: at 0.02 every loss sits where nothing has happened yet
        pad_token_id=tokenizer().pad_token_id,
        tie_word_embeddings=True,
        **({} if num_labels is None else {"num_labels": num_labels}),
        architectures=["Qwen2ForCausalLM" if num_labels is None else "Qwen2ForSequenceClassification"],
    )


@lru_cache
def _original(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    if kind == "reward":
        return Qwen2Classifier(_config(num_labels=1))
    model = Qwen2ForCausalLM(_config(num_labels=None))
    if kind == "reference":
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.01 * torch.randn_like(parameter))
    return model


def model(kind: str, attention: str) -> PreTrainedModel:
    """A copy of the "policy", the "reference" near it, or the "reward" model, with that attention of transformers."""
    copied = copy.deepcopy(_original(kind))
    copied.set_attn_implementation(attention)
    return copied


@lru_cache
def batch() -> Batch:
    """Ragged, with a gap in two of the answers, where a tool or a user would have spoken."""
    generator = torch.Generator().manual_seed(1)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=generator))

    def tokens(count: int) -> list[int]:
        return torch.randint(10, len(tokenizer()), (count,), generator=generator).tolist()

    sequences = []
    for _ in range(NUM_PAIRS):
        prompt = tokens(number(3, 9))
        for _ in range(2):
            completion = tokens(number(4, LONGEST_COMPLETION))
            mask = [1] * len(completion)
            if len(completion) >= 9:
                mask[3:6] = [0, 0, 0]
            sequences.append(Sequence(prompt, completion, mask))
    assert sum(0 in sequence.mask for sequence in sequences) >= 2
    return Batch(
        sequences=sequences,
        advantages=torch.randn(2 * NUM_PAIRS, generator=generator),
        margins=torch.rand(NUM_PAIRS, generator=generator),
        noise=[0.3 * torch.randn(len(sequence.ids), generator=generator) for sequence in sequences],
    )
