"""Whole runs at tiny size, and what must hold of each: the same on a GPU and, where the run allows it, on a CPU.

A run is the real command line on the configuration of a CPU example; `on("cuda")` adds what puts it on a GPU.
"""

from dataclasses import dataclass
from typing import Any, Literal

from tests.functional.cli import BARE, SMALL, Finished, exact, example

Device = Literal["cpu", "cuda"]

GRPO = (*SMALL, *BARE, "grpo.num_prompts_per_step=16", "grpo.num_generations_per_prompt=8")
GRPO = (*GRPO, "policy.train_global_batch_size=128", "policy.train_micro_batch_size=32")

ON_A_GPU = ("cluster.gpus_per_node=1",)
ENGINE_ON_A_GPU = (
    "policy.generation.vllm_cfg.gpu_memory_utilization=0.3",
    "policy.generation.vllm_cfg.enforce_eager=false",  # compiled, with CUDA graphs that must follow every refit
)
LARGEST_ERROR = {"float32": 1.0001, "bfloat16": 1.02}
"""`train/token_mult_prob_error` of a sound run; on a CPU, float32 is 1.00001."""


@dataclass(frozen=True)
class Scenario:
    """A run of `examples/run_<script>.py`."""

    script: str = "grpo_math"
    config: str = "grpo_math_cpu"
    precision: Literal["float32", "bfloat16"] = "bfloat16"
    overrides: tuple[str, ...] = ()
    samples: bool = True
    error: float | None = None  # at most, where not as in LARGEST_ERROR

    @property
    def example(self) -> dict[str, Any]:
        return example(self.script, self.config)

    def on(self, device: Device) -> tuple[str, ...]:
        """All overrides."""
        common = (*(GRPO if self.samples else ()), f"policy.precision={self.precision}")
        if device == "cpu":
            return (*common, *(text.replace("gpus_per_node", "cpu_workers_per_node") for text in self.overrides))
        return (*common, *ON_A_GPU, *(ENGINE_ON_A_GPU if self.samples else ()), *self.overrides)


MEGATRON, LAYERS = "grpo_math_megatron_cpu", "policy.megatron_cfg.transformer_impl"
PACKED = "policy.sequence_packing.enabled=true"
LORA = ("+policy.dtensor_cfg.lora_cfg={enabled: true, dim: 8, refit: adapter}",)
DRAFTS = (
    "+policy.generation.vllm_kwargs.speculative_config="
    "{method: draft_model, model: the folder of the policy, num_speculative_tokens: 3}",
)
SPLIT = ("policy.generation.colocated={enabled: false, resources: {gpus_per_node: 1}}", "cluster.gpus_per_node=2")
IN_FLIGHT = (
    "grpo.max_num_steps=6",
    "grpo.async_grpo={enabled: true, in_flight_weight_updates: true, max_trajectory_age_steps: 2}",
    "loss_fn.use_importance_sampling_correction=true",
    *SPLIT,
)
AGAIN = "grpo.async_grpo.recompute_kv_cache_after_weight_updates"
ROWS = ("checkpointing.enabled=false", "checkpointing.metric_name=null")

# In the order in which they prove most.
SCENARIOS: dict[str, Scenario] = {
    "bfloat16": Scenario(overrides=("grpo.max_num_steps=8",)),
    "float32": Scenario(precision="float32"),
    "killed engine": Scenario(overrides=("grpo.max_num_steps=12",)),
    "drafts": Scenario(overrides=DRAFTS),
    "adapters": Scenario(overrides=LORA),
    "fp8": Scenario(overrides=("policy.generation.vllm_cfg.precision=fp8",), error=1.1),
    "resumed": Scenario(overrides=("checkpointing.enabled=true", "checkpointing.metric_name=null")),
    "megatron": Scenario(config=MEGATRON, overrides=(f"{LAYERS}=local", PACKED)),
    "transformer engine": Scenario(config=MEGATRON, overrides=(f"{LAYERS}=transformer_engine", PACKED)),
    "own workers": Scenario(overrides=("policy.generation.backend=hf",)),
    "split": Scenario(overrides=SPLIT),
    "tensor parallel": Scenario(
        overrides=("cluster.gpus_per_node=2", "policy.generation.vllm_cfg.tensor_parallel_size=2")
    ),
    "in flight, kept": Scenario(overrides=(*IN_FLIGHT, f"{AGAIN}=false")),
    "in flight, computed again": Scenario(overrides=(*IN_FLIGHT, f"{AGAIN}=true")),
    "images": Scenario(config="grpo_vlm_cpu"),
    "experts": Scenario(overrides=("policy.model_name=tiny:arithmetic-moe",)),
    "sft": Scenario("sft", "sft_cpu", overrides=("sft.max_num_steps=30", "sft.val_period=15", *ROWS), samples=False),
    "dpo": Scenario("dpo", "dpo_cpu", overrides=("dpo.max_num_steps=4", "dpo.val_period=2", *ROWS), samples=False),
}


def agrees_at_every_step(done: Finished, name: str, num_steps: int = 4) -> None:
    """See `exact`; and the weights moved in every step."""
    scenario = SCENARIOS[name]
    exact(done.steps, num_steps, scenario.error or LARGEST_ERROR[scenario.precision])
    assert min(done.curve("train/grad_norm")) > 0
