"""A tensor-parallel plan of your own, for models that transformers has no plan for, or to try another one.

    uv run examples/run_sft.py policy.dtensor_cfg.tensor_parallel_size=2 cluster.gpus_per_node=2 \\
        policy.dtensor_cfg.custom_parallel_plan=examples.custom_parallel:plan

This one is for the modules of Llama, Qwen2 and Qwen3. Names are those of `model.named_modules()`, with * for a layer's
number. `colwise` splits a matrix by its outputs, `rowwise` by its inputs and adds the results up. Embeddings, head and
the norms between blocks need no entry. docs/adding-a-model.md has the other words.
"""

from __future__ import annotations

from transformers import PreTrainedModel

ATTENTION, MLP = "model.layers.*.self_attn.", "model.layers.*.mlp."


def plan(model: PreTrainedModel) -> dict[str, str]:
    """Patterns of module names -> how their weights are split."""
    words = {
        **dict.fromkeys((ATTENTION + name for name in ("q_proj", "k_proj", "v_proj")), "colwise"),
        **dict.fromkeys((MLP + name for name in ("gate_proj", "up_proj")), "colwise"),
        ATTENTION + "o_proj": "rowwise",
        MLP + "down_proj": "rowwise",
    }
    if model.config.model_type == "qwen3":  # norms within attention, whose weight all heads share
        norms = (ATTENTION + name for name in ("q_norm", "k_norm"))
        words |= dict.fromkeys(norms, "replicated_with_grad_allreduce")
    return words
