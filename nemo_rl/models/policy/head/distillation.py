"""Outputs of teacher and student for each scored token in distillation.

    the teacher's k largest logits:   TopKLogits  -> column `teacher_topk`   -> TopKLogprobs of the student
    its whole distribution:           LastStates  -> column `teacher_states` -> FullKL of the student

The whole distribution travels as the teacher's last hidden states, H numbers per token instead of V. The student's
ranks have the teacher's head too and compute the logits of both, a tile at a time.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
from transformers import PretrainedConfig

from nemo_rl.models.policy.batch.row_layout import ModelBatch
from nemo_rl.models.policy.head.linear import linear_kl, linear_topk_logprobs, topk_logits
from nemo_rl.models.policy.head.logit_tiles import LogitTransform
from nemo_rl.models.policy.head.logprobs import logit_transform
from nemo_rl.models.policy.head.tasks import HeadModel, HeadTask
from nemo_rl.models.policy.pretrained import DTYPES, build_on_meta
from nemo_rl.models.policy.weight_loading import StoredModel, named_tensors

TEACHER_TOPK = "teacher_topk"
TEACHER_STATES = "teacher_states"


@dataclass(frozen=True)
class TopKLogits(HeadTask):
    """The k largest of the first `vocab_size` logits, descending, then their token ids: float32 [N, 2k].

    Logits and token ids travel as one column. Float32 holds every integer up to 2^24, so token ids stay exact.
    """

    k: int
    vocab_size: int

    @property
    def num_values(self) -> int:  # pyrefly: ignore[bad-override]  (a property)
        return 2 * self.k

    def __call__(self, model: HeadModel, states: torch.Tensor, batch: ModelBatch) -> torch.Tensor:
        values, indices = topk_logits(states, model.output_head(), self.k, vocab_size=self.vocab_size)
        return torch.cat([values, indices.to(values.dtype)], dim=1)


@dataclass(frozen=True)
class TopKLogprobs(HeadTask):
    """The student's logprobs of the teacher's top k, in that order, then its entropy: [N, k + 1]."""

    k: int

    columns = (TEACHER_TOPK,)

    @property
    def num_values(self) -> int:  # pyrefly: ignore[bad-override]  (a property)
        return self.k + 1

    def __call__(self, model: HeadModel, states: torch.Tensor, batch: ModelBatch) -> torch.Tensor:
        # Exact, though the ids travelled as float32; see `TopKLogits`.
        indices = batch.columns[TEACHER_TOPK][:, self.k :].to(torch.int64)
        logprobs, entropy = linear_topk_logprobs(states, model.output_head(), indices)
        return torch.cat([logprobs, entropy[:, None]], dim=1)


@dataclass(frozen=True)
class LastStates(HeadTask):
    """The last hidden states of a model that computes in `precision`: float32 [N, H], or int32 [N, H / 2].

    Two half-precision numbers travel in one int32, bit for bit. numpy, which the object store uses, has no bfloat16.
    Reinterpreted floats would not do: ranks that share a sequence sum their parts, and x + 0 keeps the bits of every
    int32 but not of every float (NaN, -0).
    """

    hidden_size: int
    precision: str

    @property
    def num_values(self) -> int:  # pyrefly: ignore[bad-override]  (a property)
        return self.hidden_size * DTYPES[self.precision].itemsize // self.dtype.itemsize

    @property
    def dtype(self) -> torch.dtype:  # pyrefly: ignore[bad-override]  (a property)
        return torch.float32 if self.precision == "float32" else torch.int32

    def __call__(self, model: HeadModel, states: torch.Tensor, batch: ModelBatch) -> torch.Tensor:
        assert states.dtype == DTYPES[self.precision] and states.shape[1] == self.hidden_size
        return states.detach().contiguous().view(self.dtype)


@dataclass(frozen=True, kw_only=True)
class StoredHead:
    """The output head of a model on disk."""

    model_path: str
    weight: str  # name of the tensor; the embeddings' if they are tied
    bias: str | None
    transform: LogitTransform
    precision: str  # in which its model computes

    @classmethod
    def of(cls, config: PretrainedConfig, model_path: str, precision: str) -> StoredHead:
        """The head of the model at `model_path`, a directory or hub name, of `config`. Reads names, not weights.

        Raises:
            ValueError: the weights are not in safetensors files or have other names, or the architecture does something
                unknown to its logits.
        """
        model = build_on_meta(config, DTYPES[precision])
        # By identity: a head that is tied to the embeddings is stored under their name.
        names = {id(tensor): name for name, tensor in named_tensors(model)}
        layer = model.get_output_embeddings()
        assert isinstance(layer, torch.nn.Linear), "this model has no output head"
        head = cls(
            model_path=model_path,
            weight=names[id(layer.weight)],
            bias=None if layer.bias is None else names[id(layer.bias)],
            transform=logit_transform(config),
            precision=precision,
        )
        with StoredModel(model_path) as stored:
            absent = {head.weight, head.bias} - {None} - (stored.names or set())
        if absent:
            raise ValueError(
                f"teacher.model_name: {model_path!r} has no safetensors file with {', '.join(sorted(map(str, absent)))}"
                ", which the student needs for the KL over the whole vocabulary; save the teacher again with "
                "save_pretrained, or set distillation.topk_logits_k"
            )
        return head

    @functools.lru_cache(maxsize=1)  # noqa: B019 (heads are few, and the worker clears the cache at each offload)
    def rows(self, start: int, stop: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight [stop - start, H] and bias [stop - start] of these rows, on the device until `rows.cache_clear()`."""
        dtype = DTYPES[self.precision]
        with StoredModel(self.model_path) as stored:
            weight = stored.tensor(self.weight)[start:stop].to(device, dtype)
            bias = None if self.bias is None else stored.tensor(self.bias)[start:stop].to(device, dtype)
        return weight, bias


@dataclass(frozen=True)
class FullKL(HeadTask):
    """KL(teacher || student) and KL(student || teacher) over the first `vocab_size` tokens: [N, 2].

    Both are under the student's sampling temperature. Every rank of the student caches the rows of the teacher's head
    for its part of the vocabulary, on its device, from the first call until the model is offloaded.
    """

    teacher: StoredHead
    vocab_size: int

    num_values = 2
    columns = (TEACHER_STATES,)

    def __call__(self, model: HeadModel, states: torch.Tensor, batch: ModelBatch) -> torch.Tensor:
        head = model.output_head()
        stop = min(head.start + len(head.weight), self.vocab_size)
        weight, bias = self.teacher.rows(min(head.start, stop), stop, states.device)
        transform = self.teacher.transform  # the teacher's own; the temperature is the student's
        # Without a group: the student reduces the sums of both distributions over its own ranks.
        teacher_head = replace(
            head, weight=weight, bias=bias, transform=transform, group=None, vocab_size=self.vocab_size
        )
        # Undoes the packing of `LastStates`: the same bits in the dtype of the teacher.
        teacher_states = batch.columns[TEACHER_STATES].view(weight.dtype)
        kl = linear_kl(states, head, teacher_states, teacher_head, vocab_size=self.vocab_size)
        return torch.stack(kl, dim=1)
