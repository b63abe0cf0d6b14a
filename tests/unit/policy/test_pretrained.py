"""Steps on a pretrained model of 135M parameters: losses and norms of gradients are those of a loop in plain torch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from nemo_rl.algorithms.config.distillation import DistillationLossConfig
from nemo_rl.algorithms.config.supervised import DPOLossConfig, RewardModelLossConfig
from nemo_rl.algorithms.losses.distillation import DistillationLoss
from nemo_rl.algorithms.losses.nll import NLLLoss
from nemo_rl.algorithms.losses.preference import DPOLoss, PreferenceLoss
from nemo_rl.algorithms.plan.batch import plan_samples
from nemo_rl.algorithms.plan.micro_batches import Batching
from nemo_rl.models.policy.head.distillation import TopKLogits, TopKLogprobs
from nemo_rl.models.policy.head.tasks import HeadTask, Logprobs, Scalars
from nemo_rl.models.policy.pretrained import load_config
from nemo_rl.types import Example, ExampleGroup, LossFunction, PlannedSample, SamplingParams
from tests.conversations import assistant, user
from tests.unit.policy.steps import PACKED, make_worker, policy_config, whole_weights
from tests.worlds import run_world

NUM_STEPS, LR, MAX_GRAD_NORM, BETA, K = 3, 1e-5, 1.0, 0.5, 8
PAIRS = [  # question, chosen, rejected
    ("What is the capital of France?", "Paris.", "The capital of France is Berlin."),
    ("What is 3 + 4?", "3 + 4 = 7", "8"),
]
FIVE_DIGITS = 1e-5


def sequences(folder: Path) -> list[tuple[list[int], int]]:
    """Chosen, rejected, chosen, rejected: token ids, and how many of them are the prompt."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = []
    for question, *answers in PAIRS:
        asked = [{"role": "system", "content": "Be brief."}, user(question)]
        prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=True)["input_ids"]
        for answer in answers:
            ids = tokenizer.apply_chat_template([*asked, assistant(answer)], return_dict=True)["input_ids"]
            assert ids[: len(prompt)] == prompt
            found.append((ids, len(prompt)))
    return found


# -- this library


def load(worker: Any, folder: Path, *, pairs: bool) -> None:
    planned, group = [], ExampleGroup(samples=[])
    found = sequences(folder)
    size = 2 if pairs else 1
    for start in range(0, len(found), size):
        part = found[start : start + size]
        lengths = tuple(len(ids) for ids, _ in part)
        planned.append(PlannedSample(group=0, index=start, lengths=lengths, advantage=0.0, mask=1.0))
        for ids, prompt in part:
            mask = np.arange(len(ids)) >= prompt
            group.samples.append(
                Example(sample_id=str(start), token_ids=np.array(ids, dtype=np.int32), token_mask=mask)
            )
    plan = plan_samples(
        [[one] for one in planned],
        [0],
        num_ranks=1,
        global_batch_size=len(planned),
        batching=Batching.of(worker.config, quadratic_weight=0.001, sequences_per_sample=size),
    )
    worker.load(plan.ranks[0], {0: (0, 0)}, [group])


def our_steps(folder: Path, kinds: list[str]) -> dict[str, list[float]]:
    """Losses and norms of `NUM_STEPS` steps of each kind, one kind after the other."""
    optimizer = {"name": "torch.optim.AdamW", "kwargs": {"lr": LR, "weight_decay": 0.0}}
    config = policy_config(model_name=str(folder), optimizer=optimizer, logprob_chunk_size=64, **PACKED)
    has_reference = kinds != ["sft"]
    sampling = SamplingParams(max_new_tokens=1)
    worker = make_worker(folder, config, sampling=sampling, init_reference_model=has_reference)
    whole, vocabulary = Logprobs(filtered=False), load_config(str(folder), {}).vocab_size
    preference = DPOLossConfig(reference_policy_kl_penalty=BETA, sft_average_log_probs=False)
    reverse = DistillationLossConfig(kl_type="reverse", zero_outside_topk=False)
    losses: dict[str, tuple[LossFunction, HeadTask]] = {
        "sft": (NLLLoss(), whole),
        "dpo": (DPOLoss(preference), whole),
        "distillation": (DistillationLoss(reverse), TopKLogprobs(K)),
    }
    found = {}
    for kind in kinds:
        load(worker, folder, pairs=kind == "dpo")
        if kind == "dpo":
            worker.compute_reference_logprobs()
            worker.sum_column("reference_policy_logprobs", "reference_logprob_sum")
        if kind == "distillation":  # the teacher is the model as it was
            with worker.reference():
                worker.compute(TopKLogits(K, vocabulary), "teacher_topk", is_reference=True)
        results = [worker.train(*losses[kind]) for _ in range(NUM_STEPS)]
        found[kind] = [value for one in results for value in one.losses + one.grad_norms]
    return found


def our_reward_steps(folder: Path) -> tuple[Tensor, list[float]]:
    """The head of a new reward model [1, H], and the steps with it."""
    optimizer = {"name": "torch.optim.AdamW", "kwargs": {"lr": LR, "weight_decay": 0.0}}
    head = {"enabled": True, "reward_model_type": "bradley_terry"}
    config = policy_config(model_name=str(folder), optimizer=optimizer, reward_model_cfg=head, **PACKED)
    worker = make_worker(folder, config, sampling=SamplingParams(max_new_tokens=1), init_reference_model=False)
    weight = whole_weights(worker)["score.weight"].clone()
    load(worker, folder, pairs=True)
    results = [worker.train(PreferenceLoss(RewardModelLossConfig()), Scalars()) for _ in range(NUM_STEPS)]
    return weight, [value for one in results for value in one.losses + one.grad_norms]


# -- plain torch


class Loop:
    """The same sequences, right-padded, and the same optimizer."""

    def __init__(self, model: Any, folder: Path) -> None:
        rows = sequences(folder)
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
        self.ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(ids) for ids, _ in rows], batch_first=True)
        positions = torch.arange(self.ids.shape[1])
        self.attended = torch.stack([positions < len(ids) for ids, _ in rows])
        self.learned = torch.stack([(positions >= prompt) & (positions < len(ids)) for ids, prompt in rows])[:, 1:]

    def logits(self) -> Tensor:
        return self.model(input_ids=self.ids, attention_mask=self.attended.long()).logits

    def steps(self, loss_of: Callable[[], Tensor]) -> list[float]:
        found = []
        for _ in range(NUM_STEPS):
            loss = loss_of()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
            self.optimizer.step()
            self.optimizer.zero_grad()
            found += [loss.item(), norm.item()]
        return found


def torch_steps(folder: Path, kinds: list[str]) -> dict[str, list[float]]:
    loop = Loop(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), folder)
    num_tokens = loop.learned.sum()

    def log_p() -> Tensor:
        return loop.logits()[:, :-1].double().log_softmax(-1)

    def sums(logprobs: Tensor) -> Tensor:
        return (logprobs.gather(-1, loop.ids[:, 1:, None])[..., 0] * loop.learned).sum(-1)

    def dpo() -> Tensor:
        ratios = sums(log_p()) - sums(initial)
        return -logsigmoid(BETA * (ratios[::2] - ratios[1::2])).mean()

    def distillation() -> Tensor:
        top = initial.topk(K, dim=-1)
        teacher, student = top.values.log_softmax(-1), log_p().gather(-1, top.indices).log_softmax(-1)
        return ((student.exp() * (student - teacher)).sum(-1) * loop.learned).sum() / num_tokens

    with torch.no_grad():
        initial = log_p()
    losses = {"sft": lambda: -sums(log_p()).sum() / num_tokens, "dpo": dpo, "distillation": distillation}
    return {kind: loop.steps(losses[kind]) for kind in kinds}


def torch_reward_steps(folder: Path, head: Tensor) -> list[float]:
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32)
    with torch.no_grad():
        model.score.weight.copy_(head)
    loop = Loop(model, folder)

    def loss_of() -> Tensor:
        hidden = model.model(input_ids=loop.ids, attention_mask=loop.attended.long()).last_hidden_state
        last = loop.attended.sum(-1) - 1
        scores = model.score(hidden[torch.arange(len(last)), last])[:, 0]
        return -logsigmoid(scores[::2] - scores[1::2]).mean()

    return loop.steps(loss_of)


WHOLE = ["sft", "dpo", "distillation"]
LONG = "a step of 135M parameters takes seconds, and the model is made once in a cache"


@pytest.mark.over_20s(LONG)
@pytest.mark.parametrize("kinds", [["sft"], pytest.param(WHOLE, marks=pytest.mark.slow)], ids="+".join)
def test_steps_are_those_of_plain_torch(smollm2: Path, kinds: list[str]) -> None:
    """One kind after the other, so that the second and the third begin at weights that have moved."""
    ours = run_world(lambda *_: our_steps(smollm2, kinds), 1)[0]
    theirs = torch_steps(smollm2, kinds)
    for kind in kinds:
        assert ours[kind] == pytest.approx(theirs[kind], rel=FIVE_DIGITS), kind


@pytest.mark.slow
def test_a_reward_model_steps_as_plain_torch_does(smollm2: Path) -> None:
    head, ours = run_world(lambda *_: our_reward_steps(smollm2), 1)[0]
    assert ours == pytest.approx(torch_reward_steps(smollm2, head), rel=FIVE_DIGITS)
