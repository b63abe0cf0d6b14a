"""What is checked and shown before anything starts: models, environments, servers, placement, and rows of data."""

import json
import logging
import re
import shutil
import stat
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.algorithms.data_preview import load_run_config, preview_inputs
from nemo_rl.algorithms.interruption import Interruption
from nemo_rl.algorithms.parts.environments import check_environments
from nemo_rl.algorithms.parts.hardware import check_hardware, check_processes, slow_precision
from nemo_rl.algorithms.parts.model import Model
from nemo_rl.algorithms.parts.placement import describe_placement
from nemo_rl.algorithms.parts.saves import Saves
from nemo_rl.algorithms.parts.server import http_server_token, write_address
from nemo_rl.algorithms.run import Command, Run
from nemo_rl.config.errors import ConfigError
from nemo_rl.distributed.limits import process_limits
from nemo_rl.models.generation.engine_config import HttpServerConfig
from nemo_rl.utils.checkpoint.manager import CheckpointIdentityError, check_identity
from nemo_rl.utils.timer import TimeoutChecker
from tests.tables import FINE, cases, lines, named, pattern
from tests.unit.config.run_configs import CONFIGS, MEGATRON, build
from tests.unit.generation.configs import generation_config
from tests.unit.rollouts.test_openai_server import settings

MISSING = """
type: retrieval, dataset_name: nope.jsonl -> env.it.dataset_name: the corpus 'nope.jsonl' does not exist
type: retrieval, dataset_name: 'nomod:f' -> env.it.dataset_name: ... no module 'nomod'
type: retrieval, dataset_name: 'json:f' -> env.it.dataset_name: ... 'json' has no 'f'
type: python_tools, tools: ['nomod:x'] -> env.it.tools: ... no module 'nomod'
type: llm_judge, base_url: 'http://localhost:1/v1', model: m, api_key_env: NOT_SET
    -> env.it.api_key_env: ... NOT_SET is not set; export it
type: mcp, servers: {a: {command: x}}, environment: {type: 'nomod:f'} -> env.it.environment.type: ... no module
type: remote, base_url: 'http://localhost:1', token_env: NOT_SET -> env.it.token_env: ... NOT_SET
type: composite, reward_functions: [{name: a, reward: format, kwargs: {pattern: x}}, {name: b, reward: 'nomod:f'}]
    -> env.it.reward_functions.1: ... no module 'nomod'
"""


@pytest.mark.parametrize(("section", "told"), lines(MISSING))
def test_a_missing_input_is_named_with_its_key(section: str, told: str, alone: None, monkeypatch) -> None:
    monkeypatch.delenv("NOT_SET", raising=False)
    environments = build(f"+env.it={{{section}}}").env
    with pytest.raises((ValueError, FileNotFoundError), match=pattern(told)):
        check_environments(environments, ["it"])
    check_environments(environments, ["math"])  # no dataset names it


def identity_of(model: Path, *overrides: str) -> dict[str, Any]:
    config = build(f"policy.model_name={model}", *overrides)
    return json.loads(json.dumps(Model.prepare(config.policy, config.checkpointing).identity))


def test_adapters_of_another_kind_are_another_run(tiny_model_dir: Path) -> None:
    lora = "policy.dtensor_cfg.lora_cfg."
    saved = identity_of(tiny_model_dir, f"{lora}enabled=true")
    for changes, told in cases("""
        dim=16 & alpha=16 -> dim: the checkpoint has 8, this run 16 ... alpha: the checkpoint has 32.0
        match_all_linear=false & target_modules=[q_proj,v_proj] & exclude_modules=[o_proj]
            -> exclude_modules: the checkpoint has [], ... target_modules: the checkpoint has 'all'
        enabled=false -> enabled: the checkpoint has True, this run '(absent)'
    """):
        current = identity_of(tiny_model_dir, f"{lora}enabled=true", *(lora + change for change in changes))
        with pytest.raises(CheckpointIdentityError) as refusal:
            check_identity(saved, current)
        assert all(part in str(refusal.value) for part in told.split(" ... "))


def test_another_model_or_tokenizer_is_another_run(tiny_model_dir: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny_model_dir, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    before, after = identity_of(tiny_model_dir), identity_of(copy)
    assert before["policy.model"]["config_hash"] != after["policy.model"]["config_hash"]
    assert before["policy.tokenizer"] == after["policy.tokenizer"]
    other = identity_of(tiny_model_dir, "policy.tokenizer.chat_template='{{ messages }}'")
    assert before["policy.tokenizer"]["vocabulary_hash"] == other["policy.tokenizer"]["vocabulary_hash"]
    assert before["policy.tokenizer"]["chat_template_hash"] != other["policy.tokenizer"]["chat_template_hash"]


def test_a_model_that_is_not_there_is_named_as_it_was_given(tmp_path: Path) -> None:
    there = tmp_path / "policy.model_name"
    config = build(f"policy.model_name={there}")
    with pytest.raises(ValueError, match=rf"^value\.model_name: .*{re.escape(str(there))}"):
        Model.prepare(config.policy.at("value"), config.checkpointing)


def test_the_servers_token_is_random_or_that_of_the_environment_and_its_file_for_the_owner_alone(monkeypatch, tmp_path):
    engine = generation_config().engine
    random, another = (http_server_token(engine) for _ in range(2))
    assert len(random) >= 32 and random != another
    named = engine.model_copy(update={"http_server": HttpServerConfig(token_env="AGENT_TOKEN")})
    monkeypatch.delenv("AGENT_TOKEN", raising=False)
    with pytest.raises(ValueError, match=r"http_server\.token_env: .*AGENT_TOKEN"):
        http_server_token(named)
    monkeypatch.setenv("AGENT_TOKEN", "geheim\n")
    assert http_server_token(named) == "geheim"
    path = write_address(tmp_path, "http://127.0.0.1:1/v1", settings())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert json.loads(path.read_text()) == {"base_url": "http://127.0.0.1:1/v1", "api_key": "secret", "model": "tiny"}
    assert list(tmp_path.iterdir()) == [path]


def lines_of(*overrides: str) -> list[str]:
    return [" ".join(line.split()) for line in describe_placement(build(*overrides)).splitlines()]


def test_a_placement_refuses_adapters_that_the_model_does_not_take() -> None:
    for layer, told in (("lm_head", "takes in lm_head, the output head, .* is tied to the"), ("x_proj", "matches no")):
        lora = f"{{enabled: true, match_all_linear: false, target_modules: [{layer}]}}"
        with pytest.raises(ConfigError, match=told):
            lines_of("policy.model_name=tiny:arithmetic", f"policy.dtensor_cfg.lora_cfg={lora}")


def test_a_placement_names_an_engine_that_this_machine_lacks_and_cannot_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NEMO_RL_VENV_DIR", str(tmp_path))
    on_cpu = ("cluster.gpus_per_node=0", "policy.model_name=tiny:arithmetic", "policy.precision=float32")
    on_cpu = (*on_cpu, "policy.generation.backend=sglang")
    assert "WARNING" not in " ".join(lines_of(*on_cpu))  # uv makes its environment when the run starts
    monkeypatch.setenv("PATH", str(tmp_path))
    told = next(line for line in lines_of(*on_cpu) if line.startswith("WARNING policy.generation.backend=sglang"))
    assert "(not installed)" in told and "install uv or the extra 'sglang'" in told


def test_a_placement_on_cpus_says_how_often_a_prompt_is_computed() -> None:
    on_cpu, engine = ("cluster.gpus_per_node=0", "policy.model_name=tiny:arithmetic"), "policy.generation.vllm_cfg"
    once, often = (
        f"prompts an engine computes a prompt {how}" for how in ("once for its 16 samples", "16 times, once")
    )
    assert once in lines_of(*on_cpu)
    assert any(line.startswith(often) for line in lines_of(*on_cpu, f"{engine}.enable_prefix_caching=false"))
    for overrides in ("cluster.gpus_per_node=0", "cluster.gpus_per_node=1"):  # of a model that is not here; on GPUs
        assert not any(line.startswith("prompts ") for line in lines_of(overrides))


@pytest.mark.parametrize(
    ("overrides", "flags", "keys"),
    [
        ((), {"avx2"}, "policy.precision=float32 policy.generation.vllm_cfg.precision=float32"),
        (("policy.generation.vllm_cfg.precision=float32",), {"avx512f"}, "policy.precision=float32"),
        (("policy.precision=float32",), {"avx2"}, None),
        ((), {"avx2", "avx512_bf16"}, None),
        ((), {"asimd", "bf16"}, None),
        ((), set(), None),
        (("cluster.gpus_per_node=1",), {"avx2"}, None),
    ],
)
def test_bfloat16_on_a_cpu_without_its_instructions_is_told(overrides, flags, keys) -> None:
    told = slow_precision(build("cluster.gpus_per_node=0", *overrides), flags)
    assert told is keys if keys is None else str(told).endswith(f"set {keys}")


def test_every_axis_of_a_layout_is_shown() -> None:
    axes = ("pipeline_parallel", "dp_replicate", "context_parallel", "tensor_parallel", "expert_parallel")
    lines = lines_of(
        "cluster.gpus_per_node=8",
        "cluster.num_nodes=4",
        *(f"policy.dtensor_cfg.{axis}_size=2" for axis in axes),
        "policy.dtensor_cfg.lora_cfg={enabled: true, match_all_linear: false, target_modules: [q_proj, v_proj]}",
        "policy.sequence_packing={enabled: true, train_mb_tokens: 1024, logprob_mb_tokens: 4096}",
    )
    assert "per data rank 128 samples, 128 in each optimizer step" in lines
    assert "micro-batches packed, at most 1024 tokens; for logprobs alone 4096; each cut over 2 context ranks" in lines
    assert "policy m on 32 ranks: 2 pipeline x 4 data x 2 context x 2 tensor" in lines
    experts = "experts over groups of 2, then FSDP2 over 2; 2 copies (HSDP)"
    assert f"parameters 2 stages x tensor 2 x FSDP2 over 4; {experts}" in lines
    assert "trained adapters of rank 8 on q_proj, v_proj; the model itself is frozen" in lines
    first = lines.index("node GPU policy generation") + 1
    ranks = lines[first : first + 32]
    assert lines[-1].endswith(": policy.model_name=m"), "which is not on this machine"
    assert ranks[0] == "0 0 rank 0 (stage 0, copy 0, data 0, context 0, tensor 0, experts 0) engine 0"
    assert ranks[13] == "1 5 rank 13 (stage 0, copy 1, data 3, context 0, tensor 1, experts 0) engine 13"
    assert ranks[-1] == "3 7 rank 31 (stage 1, copy 1, data 3, context 1, tensor 1, experts 1) engine 31"


FOUR, JUDGE = ["cluster.gpus_per_node=4"], "{type: reward_model, model_name: rm, resources: {gpus_per_node: 1}}"
TWO = ["cluster.gpus_per_node=2", f"+env.judge={JUDGE}"]
USED = [*TWO, "data.default.env_name=judge"]


@named(
    "overrides, num_gpus, told",
    {
        "none": (FOUR, 0, r"examples/configs/grpo_math_cpu\.yaml"),
        "two of four": (FOUR, 2, r"4 GPUs wanted, 2 found.*cluster.gpus_per_node=2"),
        "four of four": (FOUR, 4, FINE),
        "a reward model without tasks": (TWO, 2, FINE),
        "a reward model in use": (USED, 3, FINE),
        "no GPU for it": (USED, 2, r"3 GPUs wanted \(1 of them for environments.*2 found.*gpus_per_node=1,"),
        "one GPU": (USED, 1, r"3 GPUs wanted \(1 of them.*1 found.*set fewer for those"),
    },
)
def test_the_gpus_that_are_wanted_and_found_are_named_and_those_of_a_reward_model_in_use_count(
    overrides: list[str], num_gpus: int, told: str
) -> None:
    with nullcontext() if told == FINE else pytest.raises(ConfigError, match=told):
        check_hardware(build(*overrides), num_gpus=num_gpus, environment={})


def test_a_run_for_which_too_few_processes_are_allowed_names_the_number_that_it_needs(tmp_path: Path) -> None:
    check_processes(345, [(400, 55, "`ulimit -u`")])
    with pytest.raises(ConfigError, match=r"needs 345 processes.* 399 are allowed, 55 of them.*\(`ulimit -u`\)"):
        check_processes(345, [(400, 55, "pids.max"), (399, 55, "`ulimit -u`")])
    group = tmp_path / "cgroups" / "mine"
    group.mkdir(parents=True)
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text("1:cpu:/\n0::/mine\n")
    found = []
    for limit in ("max", "100"):
        (group / "pids.max").write_text(f"{limit}\n")
        (group / "pids.current").write_text("7\n")
        found.append([row[:2] for row in process_limits(tmp_path / "proc", tmp_path / "cgroups")])
    assert found[1] == [*found[0], (100, 7)]


def test_a_replay_starts_no_engine(tmp_path) -> None:
    replay = (f"grpo.replay_from={tmp_path}", "grpo.val_period=0", "grpo.val_at_end=false")
    two = ("cluster.gpus_per_node=2", "policy.generation.colocated={enabled: false, resources: {gpus_per_node: 1}}")
    for apart in ((), two):
        lines = lines_of("cluster.gpus_per_node=1", *replay, *apart, "checkpointing.metric_name=null")
        assert f"generation recorded rollouts from {tmp_path}; no engine starts" in lines
        assert lines[-4:-2] == ["node GPU policy", "0 0 rank 0"], lines


DIVIDED = """
APART & GPUS=8 & RESOURCES.gpus_per_node=6 & policy.train_micro_batch_size=4 -> 2 6
APART & GPUS=0 & cluster.cpu_workers_per_node=3 & RESOURCES.cpu_workers_per_node=1 -> 2 1
APART & GPUS=2 & cluster.num_nodes=5 & RESOURCES={num_nodes: 1, gpus_per_node: 2} -> 8 2
APART & GPUS=0 & cluster.cpu_workers_per_node=2 & cluster.num_nodes=2 & RESOURCES.num_nodes=1 -> 2 2
GPUS=4 & cluster.num_nodes=2 -> 8 8
"""
ENGINES = "policy.generation.colocated"
SHORT = {"APART": f"{ENGINES}.enabled=false", "RESOURCES": f"{ENGINES}.resources", "GPUS": "cluster.gpus_per_node"}


@pytest.mark.parametrize(("overrides", "expected"), cases(DIVIDED, SHORT))
def test_one_node_is_divided_and_several_are_shared_out_whole(overrides, expected) -> None:
    config = build("cluster.worker_timeout_s=77", *overrides)
    clusters = (config.training_cluster, config.generation_cluster)
    assert [str(cluster.num_workers) for cluster in clusters] == expected.split()
    assert {cluster.worker_timeout_s for cluster in clusters} == {77}


def test_a_megatron_layout_is_checked_against_the_model_where_that_is_here() -> None:
    """tests/unit/policy/megatron/test_checks.py has the checks."""
    megatron = ("policy.megatron_cfg.enabled=true", "policy.dtensor_cfg.enabled=false", "cluster.gpus_per_node=8")
    stages = (*megatron, "policy.megatron_cfg.pipeline_model_parallel_size=4")
    for model, told in (("arithmetic", "=4: the model has 2 layers"), ("arithmetik", "did you mean tiny:arithmetic")):
        with pytest.raises(ConfigError, match=told):
            lines_of(f"policy.model_name=tiny:{model}", *stages)
    said = "model not checked against the layout: its config.json is not on this machine"
    for model in ("nobody/has-this-model", "/on/another/machine"):
        assert said in lines_of(f"policy.model_name={model}", *stages)


def test_prompts_of_a_run_that_samples():
    config = load_run_config(CONFIGS / "grpo_math_cpu.yaml", [])
    inputs = preview_inputs(config, "train", 5)
    assert [prompt.idx for prompt in inputs.prompts][:2] == [0, round((inputs.total - 1) / 4)]
    assert inputs.prompts[-1].idx == inputs.total - 1 and "sampled" in inputs.note
    (example,), meta = inputs.make(inputs.prompts[0])
    assert meta.problem is None and not example.token_mask.any()
    assert preview_inputs(config, "validation", 5).prompts[0].prompt_id.startswith("arithmetic/validation:")


def test_rows_of_a_run_that_learns_from_them(tmp_path):
    config = load_run_config(CONFIGS / "sft_cpu.yaml", ["sft.roles_to_train_on=[user]"])
    inputs = preview_inputs(config, "train", 2)
    (example,), _ = inputs.make(inputs.prompts[0])
    learned = inputs.tokenizer.decode(example.token_ids[example.token_mask])
    assert learned.endswith("<eos>") and "boxed" not in learned
    rows = [{"prompt": f"{i}+1", "chosen": "a", "rejected": "b" if i else "a"} for i in range(4)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for streaming in (False, True):
        table = f"{{dataset_name: null, split: null, data_path: {tmp_path}/pairs.jsonl, streaming: {streaming}}}"
        inputs = preview_inputs(load_run_config(CONFIGS / "dpo_cpu.yaml", [f"data.train={table}"]), "train", 3)
        assert inputs.total == (None if streaming else 4)
        made = [inputs.make(prompt) for prompt in inputs.prompts]
        assert [meta.problem_kind for _, meta in made] == ["identical_answers", "", ""]
        names = [example.sample_id for example in made[1][0]]
        assert names == [f"{inputs.prompts[1].prompt_id}/{answer}" for answer in ("chosen", "rejected")]


def test_a_file_of_no_algorithm_is_refused(tmp_path):
    for text, told in (("policy: {}\n", "it has none"), ("sft: {}\ndpo: {}\n", "it has several: sft, dpo")):
        (tmp_path / "a.yaml").write_text(text)
        with pytest.raises(ConfigError, match=told):
            load_run_config(tmp_path / "a.yaml", [])


def test_a_full_disk_ends_a_run_in_one_sentence_whoever_writes(tmp_path, capsys, monkeypatch):
    def fill(*_: Any) -> Any:
        Path("/dev/full").write_text("x")

    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # a command replaces them
    words: Any = {"num_steps": 1, "files": "the files are", "again": "resumes", "interruption": Interruption()}
    monkeypatch.setenv("NEMO_RL_CACHE", cache := str(tmp_path / "cache"))
    kept = f"; free some space for {tmp_path} and {cache}\nthe files are in {tmp_path}; the same command resumes\n"
    for has_folder, end in ((False, f"; free some space for {cache}\n"), (True, kept)):
        with Command(**words) as command:
            if has_folder:
                command.keep_files_in(tmp_path)
            fill()
        assert command.status == 1
        output = capsys.readouterr().out
        assert output.startswith("ERROR start: a disk is full: [Errno 28] No space left on device")
        assert output.endswith(end) and len(output.splitlines()) <= 2


def test_the_time_of_the_setup_counts_towards_the_deadline(tmp_path, monkeypatch):
    now, module = 0.0, "nemo_rl.algorithms.run"
    monkeypatch.setattr(f"{module}.TimeoutChecker", partial(TimeoutChecker, clock=lambda: now))
    monkeypatch.setattr(f"{module}.init_ray", lambda folder, **_: None)
    monkeypatch.setattr(f"{module}.shutdown_ray", lambda: None)

    config = build("checkpointing.checkpoint_must_save_by=00:00:20:00", f"logger.log_dir={tmp_path}")
    with Run(config) as run:
        now = 1200.0
        run.start(Saves(manager=None, identity={}))
        raise ValueError(f"late: {run.tools.deadline.check_save()}")
    assert run.status == 2
    assert "late: True" in (tmp_path / "exp_000" / "events.jsonl").read_text()


CHANGED = {
    "policy.optimizer.kwargs.lr=0.1": (
        "policy.optimizer.kwargs.lr: the checkpoint's 5e-06 applies and not 0.1, unless {}"
    ),
    "policy.scheduler_step_per=train_call": (
        "policy.scheduler_step_per: the checkpoint's optimizer_step applies and not train_call, unless {}"
    ),
    "~policy.optimizer.kwargs.eps": (
        "policy.optimizer.kwargs.eps: the checkpoint's 1e-08 applies and not default, unless {}"
    ),
    "+policy.optimizer.kwargs.foreach=true": (
        "policy.optimizer.kwargs.foreach: the checkpoint's default applies and not true, unless {}"
    ),
    "loss_fn.ratio_clip_max=0.3": "loss_fn.ratio_clip_max: 0.3 applies; it was 0.2 before",
    "grpo.overlong_filtering=true": "grpo.overlong_filtering: true applies; it was false before",
    "grpo.max_num_steps=7": None,
    "logger.log_dir=elsewhere": None,
}


def test_a_changed_hyperparameter_of_a_resumed_run_is_told_with_the_value_that_applies():
    key, first = "policy.override_opt_param_scheduler=true", build()
    changed = build(*CHANGED)
    config, told = changed.continuing(first.model_dump())
    assert sorted(told) == sorted(line.format(key) for line in CHANGED.values() if line)
    assert config.policy == first.policy and config.loss_fn == changed.loss_fn and config.grpo == changed.grpo

    changed = build("policy.optimizer.kwargs.lr=0.1", key)
    config, told = changed.continuing(first.model_dump())
    assert config == changed
    assert told == [f"policy.optimizer.kwargs.lr: 0.1 applies and not the checkpoint's 5e-06, as {key} says"]

    megatron = build(*MEGATRON)
    config, [line] = build(*MEGATRON, "policy.megatron_cfg.optimizer.lr=0.1").continuing(megatron.model_dump())
    assert config == megatron and line.startswith("policy.megatron_cfg.optimizer.lr: the checkpoint's 5e-06 applies")
