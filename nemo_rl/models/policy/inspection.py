"""An investigation on the policy's workers: how far training is from generation, and with which settings.

The functions run on a worker (`Policy.inspect`), on the rows that it has loaded. `VariantLogprobs` computes
logprobs of the same tokens under other settings of the head:

hidden states [N, H] -> head in its own or another dtype -> logits [n, V] once per chunk -> logprob under each variant
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from nemo_rl.models.policy.batch.microbatches import LoadedRow, select
from nemo_rl.models.policy.batch.row_layout import ModelBatch
from nemo_rl.models.policy.head.logit_tiles import OutputHead, Sums, Tiles, whole_logits
from nemo_rl.models.policy.head.tasks import HeadModel, HeadTask
from nemo_rl.models.policy.pretrained import load_config
from nemo_rl.utils.logprobs import smallest_kept

if TYPE_CHECKING:
    from nemo_rl.models.policy.dtensor.worker import DTensorPolicyWorker
    from nemo_rl.models.policy.worker import PolicyWorker

PLAIN = "eager"
"""The name of transformers' attention that consists of matrix products and a softmax."""

_LARGEST_DIFFERENCE = 20.0  # of logprobs; an excluded token's is infinite
_ROWS = 64  # whose logits over the whole vocabulary are in memory at a time


@dataclass(frozen=True, kw_only=True)
class RowErrors:
    """How far logprobs of training are from logprobs of generation, over the sampled tokens of one row.

    `mult_errors` and `mean_errors`: means of exp(|difference|), where 1 is perfect, and of |difference|, for each
    number that the column has per token. The others are |differences| of the first number: of the first sampled token,
    mean over the last quarter of the tokens, largest.
    """

    sample_id: str
    num_tokens: int
    mult_errors: tuple[float, ...]
    mean_errors: tuple[float, ...]
    first_token: float
    last_quarter: float
    worst_token: float


def row_errors(worker: PolicyWorker, column: str) -> list[RowErrors]:
    """The errors of a column of logprobs, [T] or [T, C], for each row with sampled tokens.

    The result is empty on all but one of the ranks that have the same rows.
    """
    rows = worker.rows.values() if worker.mesh.is_first_of_data_rank else ()
    return [_errors_of(row, column) for row in rows if row.token_mask.any()]


def _errors_of(row: LoadedRow, column: str) -> RowErrors:
    values = row.columns[column].double().view(len(row.token_ids), -1)[row.token_mask]
    found = row.columns["generation_logprobs"].double()[row.token_mask, None]
    difference = (values - found).abs().nan_to_num(nan=_LARGEST_DIFFERENCE).clamp(max=_LARGEST_DIFFERENCE)
    quarter = -(-len(difference) // 4)
    return RowErrors(
        sample_id=row.sample_id,
        num_tokens=len(difference),
        mult_errors=tuple(difference.exp().mean(dim=0).tolist()),
        mean_errors=tuple(difference.mean(dim=0).tolist()),
        first_token=difference[0, 0].item(),
        last_quarter=difference[-quarter:, 0].mean().item(),
        worst_token=difference[:, 0].max().item(),
    )


def describe_model(worker: PolicyWorker) -> dict[str, Any]:
    """The settings of the model, as its config.json with the overrides has them."""
    config = load_config(worker.settings.model_path, dict(worker.config.hf_config_overrides))
    return config.get_text_config().to_dict()


def compute_with_other_attention(worker: PolicyWorker, task: HeadTask, column: str) -> bool:
    """`compute` with the plain attention of transformers, which has its own masks and code.

    Returns False if the backend or its layout cannot. Every micro-batch of the loaded plan has one row.
    """
    if worker.config.backend_key != "dtensor_cfg":
        return False
    worker = cast("DTensorPolicyWorker", worker)
    configs = [part.config.get_text_config() for part in worker.parts]
    if worker.mesh.context is not None or any(config._attn_implementation == PLAIN for config in configs):
        return False
    # It reads the sinks of all heads at once, and its masks fit only those rows of Llama 4 that have no padding.
    kind = configs[0].model_type
    if (kind == "gpt_oss" and worker.mesh.tensor is not None) or (
        kind == "llama4_text" and worker.layout.divisible_by > 1
    ):
        return False
    used = [config._attn_implementation for config in configs]
    try:
        with torch.compiler.set_stance("force_eager"):
            for config in configs:
                config._attn_implementation = PLAIN
            worker.compute(task, column)
    finally:
        for config, implementation in zip(configs, used, strict=True):
            config._attn_implementation = implementation
    return True


def routed_otherwise(worker: PolicyWorker, task: HeadTask) -> float | None:
    """Share of tokens for which a router chose other experts than generation reports; None if it is not known.

    Every micro-batch of the loaded plan has one row.
    """
    if worker.config.backend_key != "dtensor_cfg":
        return None
    worker = cast("DTensorPolicyWorker", worker)
    rows = [row for batch in worker.plan.logprobs for row in select(worker.rows, batch)]
    if worker.router_load is None or worker.mesh.context is not None or any(r.routed_experts is None for r in rows):
        return None
    with worker.router_load.recording() as chosen:
        worker.compute(task, "routing")
    counts = torch.zeros(2, dtype=torch.float64)
    for number, row in enumerate(rows):
        assert row.routed_experts is not None
        of_engine = row.routed_experts.long().sort(dim=-1).values
        of_policy = torch.stack([layer[number][: len(of_engine)] for layer in chosen], dim=1).sort(dim=-1).values
        counts += torch.tensor([(of_policy != of_engine).flatten(1).any(dim=1).sum(), len(of_engine)])
    dist.all_reduce(counts, group=worker.mesh.data_group)
    return (counts[0] / counts[1]).item()


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Sampling parameters, and the dtype in which the head multiplies; None: as in training."""

    temperature: float
    top_k: int | None = None
    top_p: float = 1.0
    head_dtype: str | None = None


@dataclass(frozen=True)
class VariantLogprobs(HeadTask):
    """The logprob of each scored token under each variant, [N, number of variants]."""

    variants: tuple[Variant, ...]

    @property
    def num_values(self) -> int | None:  # pyrefly: ignore[bad-override]  (a property)
        return len(self.variants)

    @torch.no_grad()
    def __call__(self, model: HeadModel, states: torch.Tensor, batch: ModelBatch) -> torch.Tensor:
        head = replace(model.output_head(), temperature=1.0)
        out = torch.zeros(len(states), len(self.variants), dtype=torch.float32, device=states.device)
        for start in range(0, len(states), _ROWS):
            rows = slice(start, start + _ROWS)
            for dtype in {variant.head_dtype for variant in self.variants}:
                logits = _logits(states[rows], head, dtype)
                for number, variant in enumerate(self.variants):
                    if variant.head_dtype == dtype:
                        out[rows, number] = _logprobs(logits, variant, batch.targets[rows], head)
        return out


def _logits(states: torch.Tensor, head: OutputHead, dtype: str | None) -> torch.Tensor:
    """float32 [n, V_local]. In another dtype, states, weight and the logits themselves are rounded to it."""
    if dtype is None:
        return whole_logits(states, head)
    wanted = getattr(torch, dtype)
    bias = None if head.bias is None else head.bias.to(wanted)
    rounded = replace(head, weight=head.weight.to(wanted), bias=bias)
    return whole_logits(states.to(wanted), rounded).to(wanted).float()


def _logprobs(logits: torch.Tensor, variant: Variant, targets: torch.Tensor, head: OutputHead) -> torch.Tensor:
    logits = logits / (variant.temperature or 1.0)
    local, width = (targets - head.start)[:, None], logits.shape[1]
    index, is_here = local.clamp(0, width - 1), (local >= 0) & (local < width)
    if variant.top_k is not None or variant.top_p < 1.0:
        # As in training, the filter never excludes the token that was sampled.
        Tiles.filter(logits, smallest_kept(logits, variant.top_k, variant.top_p, head.group), index, is_here)
    sums = Sums(logits, len(logits))
    sums.chosen += torch.where(is_here, logits.gather(1, index), 0.0)
    sums.add(slice(None), logits, with_entropy=False)
    sums.reduce(head.group)
    return sums.logprobs()[:, 0]
