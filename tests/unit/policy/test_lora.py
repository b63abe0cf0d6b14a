"""Adapters: which layers, their values under every sharding, PEFT's format, and a worker that trains them."""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig

from nemo_rl.models.policy import peft_format
from nemo_rl.models.policy.config import DTensorConfig, LoRAConfig, OptimizerConfig, PolicyConfig
from nemo_rl.models.policy.dtensor import lora
from nemo_rl.models.policy.dtensor.lora import LoRALinear, apply_lora
from nemo_rl.models.policy.dtensor.model import recompute_activations
from nemo_rl.models.policy.head.tasks import Logprobs
from nemo_rl.utils.checkpoint.save import SaveRequest
from tests.tables import named
from tests.unit.policy.models import SHAPE, edit_json
from tests.unit.policy.steps import PACKED, load_step, make_worker, policy_config, train_step, whole_weights
from tests.unit.policy.test_layouts import PP, TP
from tests.unit.refit.test_weight_transfer import Link
from tests.worlds import run_world

RANK = 3  # divides by no number of ranks
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def qwen2_config(**settings: Any) -> Qwen2Config:
    return Qwen2Config(**SHAPE | settings)


def qwen2() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(qwen2_config()).eval()


def lora_config(**settings: Any) -> LoRAConfig:
    return LoRAConfig.model_validate({"enabled": True, "dim": RANK, "alpha": 7.0} | settings)


def adapted(cfg: LoRAConfig) -> Qwen2ForCausalLM:
    """By adapters that change the model: B is away from zero."""
    hf = qwen2()
    apply_lora(hf, cfg)
    lora.init_adapters(hf, cfg, seed=5)
    for _, module in lora.adapters(hf):
        nn.init.normal_(module.lora_B, std=0.1)
    return hf


def logits(hf: Any) -> torch.Tensor:
    return hf(input_ids=torch.arange(3, 15)[None], use_cache=False).logits


def layers(hf: nn.Module) -> list[str]:
    """The last parts of the names of adapted layers."""
    return [name.rpartition(".")[2] for name, _ in lora.adapters(hf)]


def test_all_linear_layers_but_the_head_are_adapted_and_nothing_else_is_trained() -> None:
    hf = qwen2()
    names = apply_lora(hf, lora_config())
    assert layers(hf) == PROJECTIONS * 2
    trained = {name for name, parameter in hf.named_parameters() if parameter.requires_grad}
    assert trained == {f"{name}.{part}" for name in names for part in ("lora_A", "lora_B")}
    assert {name for name, _ in hf.named_parameters()} - trained == {name for name, _ in qwen2().named_parameters()}
    hf = lora.adapted_model(Qwen3MoeConfig(**SHAPE, moe_intermediate_size=16, num_experts=4), lora_config())
    assert set(layers(hf)) == set(PROJECTIONS[:4])
    assert not any(p.requires_grad for name, p in hf.named_parameters() if ".mlp." in name), "experts stay frozen"


@named(
    "expected, targets, excluded",
    {
        "last parts": (["q_proj", "down_proj"] * 2, ["q_proj", "mlp.down_proj"], []),
        "a layer": (PROJECTIONS[:4], ["model.layers.0.*"], ["*.mlp.*"]),
        "all but the head": (PROJECTIONS * 2, ["*"], ["lm_head"]),
    },
)
def test_layers_are_named_by_their_last_parts_or_a_pattern(
    expected: list[str], targets: list[str], excluded: list[str]
) -> None:
    cfg = lora_config(match_all_linear=False, target_modules=targets, exclude_modules=excluded)
    assert layers(lora.adapted_model(qwen2_config(), cfg)) == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target_modules": ["qproj"]}, r"target_modules: 'qproj' .*did you mean 'q_proj'.*\n.*down_proj \(2\)"),
        ({"target_modules": ["q_proj"], "exclude_modules": ["mpl.*"]}, "exclude_modules: 'mpl"),
        ({"target_modules": ["lm_head"]}, "output head, which cannot be adapted.*tied to the embeddings"),
        ({"target_modules": ["*"]}, "add lm_head to .*exclude_modules"),
        ({"target_modules": ["k_proj"], "dim": 33}, "dim=33 is more than the full rank 32 of k_proj; set .*dim=32"),
        ({"match_all_linear": True, "exclude_modules": ["*_proj"]}, "leaves no layer to adapt"),
    ],
)
def test_settings_that_do_not_go_with_the_model_are_refused_without_weights(
    settings: dict[str, Any], message: str
) -> None:
    cfg = lora_config(**{"match_all_linear": False} | settings)
    with pytest.raises(ValueError, match=message):
        lora.adapted_model(qwen2_config(tie_word_embeddings=True), cfg)


@pytest.mark.parametrize(
    ("init", "deviation"),
    [("xavier", (2 / (1024 + 8)) ** 0.5), ("uniform", (1 / (3 * 1024)) ** 0.5), ("gaussian", 1 / 8)],
)
def test_initial_values_follow_their_distribution_seed_and_name(init: str, deviation: float) -> None:
    cfg = lora_config(dim=8, lora_A_init=init)

    def draw(name: str, seed: int) -> torch.Tensor:
        model = nn.ModuleDict({name: LoRALinear(nn.Linear(1024, 512), cfg.dim, cfg.alpha, cfg.dropout)})
        lora.init_adapters(model, cfg, seed)
        return model.get_parameter(f"{name}.lora_A").detach()

    drawn = draw("one", 1)
    assert drawn.std().item() == pytest.approx(deviation, rel=0.05)
    assert torch.equal(drawn, draw("one", 1))
    assert not any(torch.equal(drawn, other) for other in (draw("other", 1), draw("one", 2)))


def test_dropout_acts_in_training_passes_only_and_recomputed_activations_see_that_of_the_first() -> None:
    hf = adapted(lora_config(dropout=0.5))
    without = logits(hf)
    assert torch.equal(logits(hf.train()), without)
    lora.set_adapter_dropout(hf.eval(), True)
    assert not torch.equal(logits(hf), logits(hf))
    lora.set_adapter_dropout(hf, False)
    assert torch.equal(logits(hf), without)

    def gradient(mode: bool | str) -> torch.Tensor:
        hf = adapted(lora_config(dropout=0.5))
        recompute_activations(hf, mode)
        lora.set_adapter_dropout(hf, True)
        torch.manual_seed(3)
        logits(hf).square().sum().backward()
        return torch.cat([p.grad.flatten() for p in hf.parameters() if p.grad is not None])

    for mode in ("full", "selective"):
        torch.testing.assert_close(gradient(mode), gradient(False), rtol=1e-5, atol=1e-5)


def saved(directory: Path, **settings: Any) -> Path:
    """The configuration of an adapter that is written to `directory`."""
    cfg = lora_config(**settings)
    run_world(lambda rank, size: peft_format.save_peft([adapted(cfg)], cfg, directory, "models/tiny"), 1)
    return directory / "adapter_config.json"


def test_peft_and_we_compute_the_same_from_our_files_and_from_those_of_peft(tmp_path: Path) -> None:
    some = {"match_all_linear": False, "target_modules": ["model.layers.1.mlp.*", "q_proj"], "alpha": 0.5}
    saved(tmp_path / "ours", **some)
    cfg = lora_config(**some)
    config = LoraConfig(r=RANK, lora_alpha=7, target_modules=PROJECTIONS, init_lora_weights=False)
    theirs = get_peft_model(qwen2(), config).eval()
    theirs.save_pretrained(str(tmp_path / "theirs"))

    def loaded(name: str, cfg: LoRAConfig) -> torch.Tensor:
        hf = qwen2()
        apply_lora(hf, cfg)
        peft_format.load_peft([hf], tmp_path / name)
        return logits(hf).detach()

    [(ours, of_theirs)] = run_world(lambda *_: [loaded("ours", cfg), loaded("theirs", lora_config())], 1)
    torch.testing.assert_close(of_theirs, logits(theirs), rtol=0, atol=1e-6)
    for found in (ours, logits(PeftModel.from_pretrained(qwen2(), str(tmp_path / "ours")))):
        torch.testing.assert_close(found, logits(adapted(cfg)), rtol=0, atol=1e-6)


def check(directory: Path, config: Qwen2Config | None = None, **settings: Any) -> None:
    cfg = lora_config(**settings)
    peft_format.check_peft_adapter(directory, lora.adapted_model(config or qwen2_config(), cfg), cfg, "hub/tiny")


def assert_told(parts: Sequence[str], directory: Path, config: Qwen2Config | None = None, **settings: Any) -> None:
    with pytest.raises(ValueError) as raised:
        check(directory, config, **settings)
    assert [part for part in parts if part not in str(raised.value)] == [], str(raised.value)


def test_an_adapter_of_this_run_passes_the_check_and_all_that_would_compute_something_else_is_told(tmp_path):
    file = saved(tmp_path)
    check(tmp_path)
    edit_json(file, peft_version="0.99.0.dev0@abc", lora_dropout=0.3, revision="main", base_model_name_or_path=None)
    check(tmp_path)
    edit_json(file, peft_version="new")
    assert_told(["peft_version='new' is no version"], tmp_path)
    edit_json(file, use_dora=True, use_rslora=True, bias="lora_only", rank_pattern={"q_proj": 4})
    edit_json(file, something_new={"x": 1}, init_lora_weights="pissa", peft_version="1.0.0", peft_type="VERA", r=None)
    told = ["bias='lora_only'", "rank_pattern=", "something_new=", "r is missing", "peft_type='VERA' is not LORA"]
    told += ["use_dora=True is not implemented\n", "use_rslora=True", "peft_version=1.0.0 is newer"]
    assert_told([*told, "init_lora_weights='pissa' changes the base weights"], tmp_path)


def test_all_differences_from_the_run_are_listed(tmp_path: Path) -> None:
    file = saved(tmp_path, match_all_linear=False, target_modules=["q_proj", "k_proj"])
    edit_json(file, base_model_name_or_path="hub/other")
    told = [
        "rank 3, policy.dtensor_cfg.lora_cfg.dim=4",
        "alpha 7, policy.dtensor_cfg.lora_cfg.alpha=8",
        "base model 'hub/other', model_name='hub/tiny'",
        "2 layers without an adapter there: model.layers.0.self_attn.v_proj, model.layers.1",
        "2 layers without an adapter here: model.layers.0.self_attn.k_proj, model.layers.1",
    ]
    assert_told(told, tmp_path, dim=4, alpha=8.0, match_all_linear=False, target_modules=["q_proj", "v_proj"])


def test_adapters_of_other_shapes_and_damaged_files_are_told(tmp_path: Path) -> None:
    file, narrow = saved(tmp_path), qwen2_config(intermediate_size=80)
    assert_told(["gate_proj.lora_B.weight has shape [96, 3], the model needs [80, 3]"], tmp_path, narrow)
    weights = tmp_path / "adapter_model.safetensors"
    whole = weights.read_bytes()
    for damaged, half in ((weights, whole[:1000]), (file, b"{")):
        damaged.write_bytes(half)
        assert_told(["damaged adapter"], tmp_path)
        weights.write_bytes(whole)


# -- a worker: its reference, its checkpoints, where it begins, and what it sends


Weights = dict[str, torch.Tensor]
assert_near = partial(torch.testing.assert_close, rtol=0, atol=1e-6)


def config_of(adapters: dict[str, Any] | None = None, **directions: Any) -> PolicyConfig:
    dtensor_cfg = DTensorConfig(lora_cfg=lora_config(**{"dim": 4, "alpha": 8.0} | (adapters or {})), **directions)
    optimizer = OptimizerConfig(name="torch.optim.SGD", kwargs={"lr": 1.0})
    return policy_config(dtensor_cfg=dtensor_cfg, optimizer=optimizer, **PACKED, train_micro_batch_size=2)


@pytest.fixture(scope="module")
def trained(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Weights]:
    """The checkpoint of two stages after two calls, and the merged weights they had."""
    directory = tmp_path_factory.mktemp("trained")

    def two_calls(rank: int, world: int) -> Weights:
        worker = make_worker(llama, config_of(**{PP: 2}))
        for _ in range(2):  # after the first, both matrices of an adapter have gradients
            train_step(worker)
        worker.save_checkpoint(directory, SaveRequest(model_save_format="safetensors"))
        return whole_weights(worker)

    return directory, run_world(two_calls, 2)[0]


def computed(worker: Any, column: str) -> torch.Tensor:
    return torch.cat([row.columns[column] for row in worker.rows.values()])


def test_the_reference_is_the_model_it_began_with(llama, trained):
    def rank_main(rank: int, world: int) -> None:
        for adapter in ({}, {"adapter_path": str(trained[0] / "policy" / "adapter")}):
            worker, references = make_worker(llama, config_of(adapter)), []
            load_step(worker)
            worker.compute(Logprobs(), "start")
            start = computed(worker, "start")
            for _ in range(2):
                train_step(worker)
                references.append(computed(worker, "reference_policy_logprobs"))
            assert torch.equal(*references)
            assert (references[0] - start).abs().max() < 1e-6
            worker.compute(Logprobs(), "end")
            assert (computed(worker, "end") - references[1]).abs().max() > 1e-3

    run_world(rank_main, 1)


def test_frozen_weights_are_kept_in_the_compute_dtype_and_give_the_bits_of_float32_weights(llama: Path) -> None:
    def rank_main(rank: int, world: int) -> None:
        dtypes, logprobs = [], []
        for layout in (config_of().dtensor_cfg, DTensorConfig()):
            worker = make_worker(llama, policy_config(precision="bfloat16", dtensor_cfg=layout))
            dtypes.append({p.dtype for stage in worker.stages for p in stage.parameters() if not p.requires_grad})
            load_step(worker)
            worker.compute(Logprobs(), "logprobs")
            logprobs.append(computed(worker, "logprobs"))
        assert dtypes == [{torch.bfloat16}, set()]
        assert torch.equal(*logprobs)

    run_world(rank_main, 2)


def test_a_checkpoint_holds_the_adapters_alone_for_any_layout_for_peft_and_to_begin_with(llama, trained):
    step, want = trained
    written = sum(file.stat().st_size for file in step.rglob("*") if file.is_file())
    assert written < sum(file.stat().st_size for file in llama.glob("*.safetensors"))
    adapter = str(step / "policy" / "adapter")
    merged = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(llama), adapter).merge_and_unload()
    assert_near(merged.state_dict(), want)

    def on_other_ranks(rank: int, world: int) -> list[Weights]:
        resumed = make_worker(llama, config_of())
        resumed.load_checkpoint(step, load_optimizer=True)
        begun = make_worker(llama, config_of({"adapter_path": adapter}, dp_replicate_size=2))
        return [whole_weights(resumed), whole_weights(begun)]

    for found in run_world(on_other_ranks, 2)[0]:
        assert_near(found, want)


@pytest.mark.parametrize(
    ("world", "directions"),
    [(2, {"cpu_offload": True}), pytest.param(4, {PP: 2, TP: 2}, marks=pytest.mark.slow)],
    ids=["offloaded", "pp-tp"],
)
def test_base_weights_and_adapters_sent_apart_make_the_merged_weights(llama, world, directions):
    """After the first sync the adapters alone are packed, whatever the layout."""

    def synced(rank: int, world: int) -> None:
        os.environ["LOCAL_RANK"] = str(rank)
        worker = make_worker(llama, config_of({"refit": "adapter"}, **directions))
        worker.prepare_refit({"transport": "packed_shm", "wire_dtype": "float32", "bucket_bytes": 4096})
        layout = worker.sender.layout
        assert layout.num_base_buckets > 0
        link = Link(worker.sender) if rank == 0 else None
        for first in (0, layout.num_base_buckets):
            train_step(worker)
            if link is not None:
                link.sync(first, first)
            else:
                for bucket in range(first, len(layout.buckets)):
                    worker.pack(bucket)
            merged = whole_weights(worker)
            if link is not None:
                assert_near(link.own, merged)

    run_world(synced, world)
