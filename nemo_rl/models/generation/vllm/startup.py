"""The start of a vLLM engine: its environment and arguments, its requests, and the error if it does not start."""

from __future__ import annotations

import json
import os
import re
import sysconfig
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_rl.distributed.collectives import own_address, release_port
from nemo_rl.distributed.worker_template import HUGE_PAGES
from nemo_rl.models.generation.interfaces import EngineSettings
from nemo_rl.models.generation.vllm import plugins
from nemo_rl.models.generation.vllm.config import SPECULATION, VllmConfig
from nemo_rl.utils.guards import scratch_folder
from nemo_rl.utils.registry import without_collections

if TYPE_CHECKING:
    from vllm.config import VllmConfig as EngineConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

WORKER_EXTENSION = "nemo_rl.models.generation.vllm.weight_loader.WorkerExtension"
_GIB = 1024**3
_DEEPSEEK_V3_ROUTER = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
"""The router that transformers computes for every DeepSeek-V3. vLLM looks for it in config.json, which lacks it."""

_MAX_NUM_SEQS_CPU = 256


def join_nodes() -> dict[str, Any]:
    """vLLM's arguments for an engine on several nodes, from the environment of its worker group (one worker per node).

    vLLM's multiprocess executor spans nodes without Ray: the executors of all nodes connect to the first node, whose
    scheduler directs them. Its port, which the worker group reserved, is released for vLLM. Empty for one node.
    """
    num_nodes = int(os.environ.get("WORLD_SIZE", "1"))
    if num_nodes == 1:
        return {}
    rank, address, port = int(os.environ["RANK"]), os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    os.environ["VLLM_HOST_IP"] = own_address(address, port)
    if rank == 0:
        release_port()
    return {"nnodes": num_nodes, "node_rank": rank, "master_addr": address, "master_port": port}


@without_collections()
def prepare_environment(device: str, cfg: VllmConfig) -> None:
    """Set the environment variables of the engine's processes. Call before vllm is imported."""
    # vLLM's ranks have their own rendezvous; these variables are about the rendezvous of the worker group.
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    # Killed engines leave their sockets behind. What torch compiled stays where the next run finds it.
    import torch._dynamo
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())
    os.environ["TMPDIR"] = tempfile.tempdir = scratch_folder()
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("PYTHONFAULTHANDLER", "1")  # a rank that crashes in native code writes its Python stack
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")  # if the engine has one node
    if device == "cpu":
        # Compiling helpers takes longer than a short run. A forked worker has the module already, other processes read
        # the variable.
        torch._dynamo.config.disable = True
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # other processes share these cores
        # Ranks would keep 15% more memory in huge pages: parts of their heaps are never written.
        tunables = os.environ.get("GLIBC_TUNABLES", "").split(":")
        os.environ["GLIBC_TUNABLES"] = ":".join(tunable for tunable in tunables if tunable != HUGE_PAGES)
        os.environ.pop("PYTHONMALLOC", None)  # without huge pages slower than Python's own memory
        # An engine of one rank computes in its process, as on a GPU: on a CPU vLLM would give the rank a further one.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if cfg.engine_size == 1 else "1"
    elif cfg.wire_dtype == "float32":
        # Triton computes products of float32 in TF32 by default; vLLM's attention in float32 is a kernel of Triton.
        os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")


@without_collections()
def engine_config(settings: EngineSettings, nodes: Mapping[str, Any], *, headless: bool = False) -> EngineConfig:
    """vLLM's configuration. The usage decides what a step of a GPU's engine holds, unless the user does.

    Prepares the environment of the engine's processes, which start after it.
    """
    from vllm.usage.usage_lib import UsageContext

    config = engine_args(settings, nodes).create_engine_config(UsageContext.LLM_CLASS, headless=headless)
    preload_by_link(sysconfig.get_path("purelib"))
    plugins.enable()
    return config


def preload_by_link(packages: str) -> None:
    """Let the engine's processes find the libraries in the folder `packages` that vLLM has added to LD_PRELOAD.

    The list is split at spaces and colons, so that a path with one of them is reached through a link.
    """
    if re.search(r"[\s:]", packages) and packages in (preloaded := os.environ.get("LD_PRELOAD", "")):
        link = Path(scratch_folder(), "packages")
        if not link.is_symlink():  # of an engine of this process before
            link.symlink_to(packages)
        os.environ["LD_PRELOAD"] = preloaded.replace(packages, str(link))


def engine_args(settings: EngineSettings, nodes: Mapping[str, Any]) -> AsyncEngineArgs:
    """vLLM's arguments. `nodes`: from `join_nodes`. All other arguments are the same on every node of an engine."""
    from transformers import PretrainedConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

    cfg, vllm_cfg = settings.cfg, settings.cfg.vllm_cfg
    for key, message in vllm_cfg.argument_problems(cfg.vllm_kwargs):  # the driver may have no vLLM to ask
        raise ValueError(f"{cfg.key('vllm_kwargs')}.{key}: {message}")
    arguments: dict[str, Any] = {
        "model": settings.model,
        "tokenizer": settings.tokenizer,
        "dtype": vllm_cfg.wire_dtype,
        "kv_cache_dtype": vllm_cfg.kv_cache_dtype,
        "quantization": "fp8_per_block" if vllm_cfg.precision == "fp8" else None,
        "max_model_len": vllm_cfg.max_model_len,
        "tensor_parallel_size": vllm_cfg.tensor_parallel_size,
        "pipeline_parallel_size": vllm_cfg.pipeline_parallel_size,
        "seed": settings.seed,
        "load_format": settings.load_format,
        "logprobs_mode": vllm_cfg.logprobs_mode,
        "worker_extension_cls": WORKER_EXTENSION,
        "weight_transfer_config": {"backend": settings.weight_transfer},
        "disable_log_stats": not cfg.speculation,
        "use_tqdm_on_load": False,
        **nodes,
    }
    if vllm_cfg.engine_size > 1:  # inside a Ray actor vLLM would choose Ray, which does not share a node's devices
        arguments["distributed_executor_backend"] = "mp"
    # Training computes logits in float32. vLLM takes the probabilities of samples from logits in the model's data type.
    head = {"head_dtype": "float32"} if vllm_cfg.wire_dtype != "float32" else {}
    stored = PretrainedConfig.get_config_dict(settings.model)[0]
    router = _DEEPSEEK_V3_ROUTER if stored.get("model_type") == "deepseek_v3" else {}
    overrides = {**head, **router, **settings.hf_overrides, **cfg.vllm_kwargs.get("hf_overrides", {})}
    text = stored.get("text_config", stored) | overrides
    is_latent = text.get("kv_lora_rank") is not None
    if settings.device == "cpu":
        shares_prompts = cfg.shares_prompts_on_cpu and settings.can_share_prompts and not is_latent
        arguments |= {
            "enforce_eager": True,
            "enable_prefix_caching": shares_prompts,
            "enable_chunked_prefill": False,
            "block_size": plugins.BLOCK_TOKENS if shares_prompts else None,
            "max_num_seqs": _MAX_NUM_SEQS_CPU,
            "max_num_batched_tokens": vllm_cfg.batched_tokens_on_cpu,
            "kv_cache_memory_bytes": vllm_cfg.cpu_kv_cache_space_gb * _GIB,
        }
    else:
        arguments |= {
            "enforce_eager": vllm_cfg.enforce_eager,
            "enable_prefix_caching": vllm_cfg.enable_prefix_caching,
            "gpu_memory_utilization": vllm_cfg.gpu_memory_utilization,
            "enable_sleep_mode": cfg.colocated.enabled,
            # Of a draft, unless every sync brings it too.
            "sleep_preserve_parameter_names": ["draft.*"] if settings.draft is None else [],
        }
    arguments |= cfg.vllm_kwargs
    arguments["hf_overrides"] = overrides
    is_plain = settings.load_format == "dummy" and "quantization_config" in stored
    if is_plain or cfg.speculation.get("method") == "mtp":  # prediction heads see overrides only if they are a function
        arguments["hf_overrides"] = partial(_overridden, overrides=overrides, is_plain=is_plain)
    # On a CPU with AMX vLLM chooses a backend for latent attention that takes no float32. A draft has its own backend.
    latent: dict[str, Any] = (
        {"attention_backend": "CPU_MLA"} if settings.device == "cpu" and vllm_cfg.wire_dtype == "float32" else {}
    )
    if is_latent:
        arguments = latent | arguments
    if text.get("model_type") == "llama4_text":
        # vLLM's Llama 4 reads it only from here, and otherwise scales queries only above 32768 positions.
        tuning = {"attn_temperature_tuning": text.get("attn_temperature_tuning", True)}
        arguments["override_generation_config"] = tuning | cfg.vllm_kwargs.get("override_generation_config", {})
    if settings.draft is not None:
        own = {"model": draft_folder(settings.draft)} if settings.draft else {}  # a prediction head is in `model`
        arguments[SPECULATION] = {**latent, **cfg.speculation, **own, "draft_load_config": {"load_format": "dummy"}}
    elif cfg.speculation.get("method") in ("draft_model", "eagle3", "mtp"):
        # A draft has its own weights on disk; prediction heads are in the policy's checkpoint, which training does not
        # load. The weights of the target, embeddings and output head among them, come from the policy.
        arguments[SPECULATION] = {**latent, **cfg.speculation, "draft_load_config": {"load_format": "auto"}}
    if settings.max_images is not None:
        # Images come processed, and their features are kept under names that every sync changes.
        limits = {"image": settings.max_images, "video": 0}
        arguments |= {"limit_mm_per_prompt": limits, "mm_processor_cache_gb": 0}
        arguments["mm_device_do_normalize"] = False  # the processor has normalised them
        arguments["skip_mm_profiling"] = settings.device == "cpu"  # on a GPU it finds the memory of the tower
    if settings.return_routed_experts and settings.device != "cpu":  # on a CPU `ExpertRecorder` does it
        arguments["enable_return_routed_experts"] = True
    return AsyncEngineArgs(**arguments)


def draft_folder(config: Mapping[str, Any]) -> str:
    """A folder with this config.json of a draft, which vLLM reads when the engine starts."""
    folder = Path(tempfile.mkdtemp(prefix="nemo_rl_draft_"))
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def _overridden(config: Any, overrides: Mapping[str, Any], *, is_plain: bool) -> Any:
    """config.json with overrides. `is_plain`: quantised on disk, for the unquantised weights that the policy sends."""
    for name, value in overrides.items():
        if name in config.sub_configs:
            _overridden(config.__dict__[name], value, is_plain=False)
        else:
            setattr(config, name, value)
    if is_plain:
        config.__dict__.pop("quantization_config", None)  # vLLM also asks about an empty configuration
    return config


@without_collections()
def start_engine(config: EngineConfig, stat_loggers: list[Any] | None, name: str) -> AsyncLLM:
    """Start the engine's processes.

    Raises RuntimeError, with the engine's `name` and the error that kept it from starting.
    """
    from vllm.v1.engine.async_llm import AsyncLLM

    from nemo_rl.models.generation.vllm.executors import executor_class

    how: dict[str, Any] = {"log_stats": False, "log_requests": False, "stat_loggers": stat_loggers}
    # Its processes write their output and errors to the files of this one.
    logs = {Path(os.readlink(f"/proc/self/fd/{fd}")) for fd in (1, 2)}
    before = {path: path.stat().st_size for path in sorted(logs) if path.is_file()}
    try:
        return AsyncLLM(config, executor_class(config), **how)
    except RuntimeError as error:  # which only says that one of the engine's processes has failed
        raise RuntimeError(f"the engine of {name} did not start: {start_failure(before) or error}") from error


def start_failure(before: Mapping[Path, int]) -> str | None:
    """The error that kept an engine from starting, as its processes wrote it to logs with these sizes before.

    Errors of processes that waited for the failed one refer to its error.
    """
    logs = "".join(path.read_bytes()[size:].decode(errors="replace") for path, size in before.items())
    errors = re.findall(r"\b(\w*(?:Error|Exception): .+)", logs)
    return next((error for error in reversed(errors) if "root cause" not in error), None)


def num_admitted(engine: AsyncLLM, cfg: VllmConfig) -> int:
    """Requests whose KV cache fits to the last token, so that vLLM preempts none and recomputes it in other chunks.

    Raises ValueError if not even one fits.
    """
    config = engine.vllm_config
    num_blocks, concurrency = config.cache_config.num_gpu_blocks, config.cache_config.kv_cache_max_concurrency
    assert num_blocks is not None and concurrency is not None
    of_one = round(num_blocks / concurrency)  # of all groups of layers: each has blocks of its own for a request
    num_fitting = (num_blocks - 1) // of_one  # one block is vLLM's null block
    if num_fitting < 1:
        raise ValueError(
            f"the KV cache has {num_blocks - 1} blocks, and one sequence of max_model_len="
            f"{config.model_config.max_model_len} needs {of_one}: raise {cfg.key('cpu_kv_cache_space_gb')}"
        )
    return min(num_fitting, config.scheduler_config.max_num_seqs)
