"""config.json of a model directory or hub model -> the model without weights, on the meta device.

`read_model_config` and `check_fit` find mistakes on the driver, before any worker loads the model.
"""

import copy
import json
import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.initialization import no_init_weights

from nemo_rl.config.errors import some_of
from nemo_rl.config.rules import divisors
from nemo_rl.models.policy.attention import OTHER_MIXERS, attention_implementation
from nemo_rl.models.policy.config import PolicyConfig, RolloutPolicyConfig
from nemo_rl.models.policy.experts import ExpertNames
from nemo_rl.models.policy.head.scalar import (
    HEAD_WEIGHT,
    auto_class,
    check_scalar_head,
    foreign_heads,
    is_scalar,
    scalar_config,
)
from nemo_rl.models.policy.vision.families import FAMILIES, name_in_model, sees_images
from nemo_rl.models.policy.weight_loading import StoredModel, named_tensors, open_tensors
from nemo_rl.utils.checkpoint.foreign import CONVERT, find_foreign
from nemo_rl.utils.checkpoint.tensors import shape_differences

logger = logging.getLogger(__name__)

LARGE_BYTES = 1 << 30

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@contextmanager
def parameters_on_meta() -> Generator[None]:
    """Modules built inside the block get meta parameters and real buffers.

    Building under `torch.device("meta")` would lose non-persistent buffers such as the rotary `inv_freq`, which no
    checkpoint holds.
    """

    def to_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> nn.Parameter | None:
        if param is None or param.is_meta:
            return param
        return nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)

    handle = nn.modules.module.register_module_parameter_registration_hook(to_meta)  # pyrefly: ignore[bad-argument-type]
    try:
        with no_init_weights(), _LargeOnMeta():
            yield
    finally:
        handle.remove()


class _LargeOnMeta(TorchFunctionMode):
    """Makes large uninitialised tensors on the meta device: experts of a layer may exceed this machine's memory."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty and kwargs.get("device") is None:
            on_meta = func(*args, **kwargs | {"device": "meta"})
            if on_meta.nbytes > LARGE_BYTES:
                return on_meta
        return func(*args, **kwargs)


def build_on_meta(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model of `config` with meta parameters of `dtype` and no KV cache.

    It is a causal language model or, for a result of `scalar_config`, a model whose head gives one number. It uses this
    library's attention unless that would compute something else than the model's own.

    Raises:
        ValueError: the family's classifier has another head than one linear layer.
    """
    implementation = attention_implementation(config)
    with parameters_on_meta():
        # transformers writes the dtype and more into the configuration of a model it builds: hence a copy.
        model = auto_class(config).from_config(copy.deepcopy(config), dtype=dtype, attn_implementation=implementation)
    if model.base_model is model:  # Llama4ForCausalLM names a prefix that it does not have
        model.base_model_prefix = "model"
    if is_scalar(config):
        check_scalar_head(model)
    if model.config.get_text_config().model_type in OTHER_MIXERS:
        from nemo_rl.models.policy.token_mixers import isolate_sequences

        isolate_sequences(model)
    model.tie_weights()  # transformers skips it if weights are not initialised
    model.config.get_text_config().use_cache = False
    return model


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The transformer blocks: modules that the model declares must not be split over devices (`_no_split_modules`).

    Raises:
        ValueError: the architecture does not declare them.
    """
    names = set(model._no_split_modules or [])
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise ValueError(
            f"{type(model).__name__} declares no transformer blocks (_no_split_modules), so it cannot be sharded by "
            "layer; use a causal language model of transformers that does, for example Qwen2, Qwen3 or Llama"
        )
    return layers


def load_config(model_path: str, overrides: dict[str, object]) -> PretrainedConfig:
    """config.json of the model with `overrides` applied. ValueError for weights in a format that cannot be read."""
    return _plain(AutoConfig.from_pretrained(model_path, **overrides), repr(model_path))


def _plain(config: PretrainedConfig, named: str) -> PretrainedConfig:
    """The config.json of a model, which may be quantised, as if its weights were ordinary ones."""
    settings = config.to_dict().get("quantization_config")
    if settings is None:
        return config
    method = settings.get("quant_method")
    if (config.model_type, method) != ("gpt_oss", "mxfp4"):
        raise ValueError(
            f"{named} is quantised ({method}), and training needs ordinary weights; name the model that it was made "
            "from, or dequantise it with transformers and save_pretrained it. Only GPT-OSS in MXFP4 is read as it is"
        )
    del config.__dict__["quantization_config"]
    return config


INDEX_FILE = "model.safetensors.index.json"
WEIGHT_FILES = ("model.safetensors", INDEX_FILE, "pytorch_model.bin", "pytorch_model.bin.index.json")
ADAPTER_CONFIG = "adapter_config.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_CONVERT = "load it with torch and write its tensors as model.safetensors (safetensors.torch.save_file)"


def read_model_config(config: PolicyConfig, model_path: str) -> PretrainedConfig:
    """config.json of the model at `model_path` (a directory or a hub name) with `policy.hf_config_overrides` applied.

    With `policy.reward_model_cfg.enabled` it is converted by `scalar_config`.

    Raises:
        ValueError: the model does not exist, cannot be read, holds no weights, or is no causal language model; or no
            reward model can be made of it.
    """
    name, directory = config.model_name, Path(model_path)
    key, overrides = config.key("model_name"), config.key("hf_config_overrides")
    is_path = model_path.startswith((".", "/", "~")) or model_path.count("/") > 1
    if is_path and not directory.exists():
        raise ValueError(f"{key}: directory {name!r} does not exist (looked in {Path.cwd()})")
    if directory.exists() and not (directory / "config.json").is_file():
        form = _other_form(directory) or (
            f"is no model directory: it {'has no config.json' if directory.is_dir() else 'is a file'}. Expected are "
            "config.json, *.safetensors and the tokenizer's files, as save_pretrained writes them"
        )
        raise ValueError(f"{key}: {name!r} {form}")
    try:
        loaded: Any = AutoConfig.from_pretrained(model_path, return_unused_kwargs=True, **config.hf_config_overrides)
        model, ignored = loaded
    except StrictDataclassError as error:
        raise ValueError(
            f"{key}: the config.json of {name!r} (with {overrides}) contradicts itself: {error}"
        ) from error
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{key}: {name!r} cannot be loaded: {error}\nGive a Hugging Face name, the directory of a "
            "model, or tiny:arithmetic; without a network the model must be in the Hugging Face cache already"
        ) from error
    if ignored:
        raise ValueError(
            f"{overrides}: the config.json of {name!r} has no {', '.join(sorted(ignored))}, so it would "
            "change nothing in training; rope_theta and its like stand in "
            "rope_parameters: {rope_type: default, rope_theta: ...}"
        )
    model = _plain(model, f"{key}: {name!r}")
    if sees_images(model):
        check_vision_model(config, model)
    elif "language_model" in config.freeze:
        raise ValueError(
            f"{config.key('freeze')}={config.freeze}: {name!r} sees no images, so nothing would be trained; leave "
            "language_model out"
        )
    elif type(model) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"{key}: {name!r} is a {model.model_type!r} model, not a causal language model")
    elif config.freeze:
        logger.warning("%s=%s: %r sees no images and has no such parts", config.key("freeze"), config.freeze, name)
    has_score = is_scalar(model)
    if config.reward_model_cfg.enabled:
        model = scalar_config(model, config)
    elif has_score:
        assert model.architectures is not None, "`is_scalar` knows it by them"
        raise ValueError(
            f"{key}: {name!r} is a reward model or another classifier ({model.architectures[0]}), without "
            f"the head of a language model; name a language model, or set "
            f"{config.key('reward_model_cfg.enabled')}=true to train a reward model"
        )
    if directory.is_dir() and not any((directory / file).is_file() for file in WEIGHT_FILES):
        form = _other_form(directory) or f"has no weights: none of {', '.join(WEIGHT_FILES)} is there"
        raise ValueError(f"{key}: {name!r} {form}")
    if directory.is_dir():
        _check_files(f"{key}: {name!r}", directory)
        _check_tensors(config, model_path, model, has_score=has_score)
    return model


def check_vision_model(config: PolicyConfig, model: PretrainedConfig) -> None:
    """ValueError unless models of this architecture can be trained with images, with these settings."""
    key, name, kind = config.key("model_name"), config.model_name, model.model_type
    if kind not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise ValueError(f"{key}: {name!r} is a vision-language model of type {kind!r}; supported are {known}")
    sizes = config.dtensor_cfg
    refused = {
        config.megatron_cfg.key("enabled"): config.megatron_cfg.enabled,
        f"{config.reward_model_cfg.key('reward_model_type')}=regression": (
            config.reward_model_cfg.enabled and config.reward_model_cfg.reward_model_type == "regression"
        ),
        sizes.key("pipeline_parallel_size"): sizes.pipeline_parallel_size > 1,
        sizes.key("expert_parallel_size"): sizes.expert_parallel_size > 1,
        # Features of images join after layers too, whose states each rank would have for its own positions.
        sizes.key("sequence_parallel"): sizes.sequence_parallel and kind == "qwen3_vl",
    }
    if asked := [name for name, is_on in refused.items() if is_on]:
        raise ValueError(f"{asked[0]}: not with {kind} models, such as {name!r}; switch it off")


def _other_form(path: Path) -> str:
    """The content of a file or a directory that is no model, and the remedy; "" if that is not known."""
    files = [path] if path.is_file() else sorted(path.iterdir())
    if (foreign := find_foreign(path)) is not None:
        return f"is {foreign} and no model directory: {foreign.remedy(path)}; then name the new folder"
    if (path / "policy" / "weights").is_dir():
        convert = f"{CONVERT} --checkpoint {path} --hf-ckpt-path NEW_FOLDER"
        return f"is a checkpoint and no model directory: make one of it, and name that: {convert}"
    adapter = path / ADAPTER_CONFIG
    if adapter.is_file():
        try:
            base = json.loads(adapter.read_text(encoding="utf-8")).get("base_model_name_or_path")
        except (ValueError, AttributeError) as error:
            return f"is an adapter whose {ADAPTER_CONFIG} is damaged ({error}); copy it again"
        whole = repr(base) if base else f"that it was made for ({ADAPTER_CONFIG} does not name it)"
        return (
            f"is an adapter and no model: name the model {whole}, with the adapter in dtensor_cfg.lora_cfg."
            "adapter_path (and enabled=true), or merge the two with examples/converters/convert_lora_to_hf.py"
        )
    if found := [file.name for file in files if file.suffix == ".gguf"]:
        return (
            f"has its weights in the format GGUF ({some_of(found, 4)}): name a file, such as {path / found[0]}, or "
            "the model that it was made from"
        )
    if found := [file.name for file in files if file.suffix in PICKLES]:
        return f"has its weights in pickles that are not read ({some_of(found, 4)}): {_CONVERT}"
    return ""


def _check_files(model: str, directory: Path) -> None:
    """Check that every file of weights in a model directory exists and is not cut short.

    `model`: key and name, for messages.
    """
    index = next((file for file in WEIGHT_FILES if file.endswith(".json") and (directory / file).is_file()), None)
    file, files = directory, set[str]()
    try:
        if index is not None:
            file = directory / index
            files = set(json.loads(file.read_text(encoding="utf-8"))["weight_map"].values())
        for file in sorted(directory.glob("*.safetensors")) or sorted(directory.glob("pytorch_model*.bin")):
            with open_tensors(str(file)):  # reads what describes the tensors, and knows the size of the file
                pass
    except (ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise ValueError(f"{model}: {file.name} is damaged ({error}); copy it again") from error
    except (UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(
            f"{model}: {file.name} is cut short, or holds more than tensors, which nothing here executes: copy it "
            f"again, or, if you trust it, {_CONVERT}"
        ) from error
    if absent := sorted(file for file in files if not (directory / file).is_file()):
        raise ValueError(
            f"{model} is not whole: {index} names {len(files)} files, of which "
            f"{len(absent)} are missing: {some_of(absent, 4)}; copy them too"
        )


def _check_tensors(policy: PolicyConfig, model_path: str, config: PretrainedConfig, *, has_score: bool) -> None:
    """Check that the headers in a model directory name the tensors of the model of `config`, with its shapes.

    `has_score`: config.json describes a reward model, whose head must exist; a language model may lack it. A directory
    with unknown names only is left to transformers, which knows the names of older models.
    """
    name, key, overrides = policy.model_name, policy.key("model_name"), policy.key("hf_config_overrides")
    try:
        model = build_on_meta(copy.deepcopy(config), torch.bfloat16)
    except (ValueError, IndexError, KeyError, TypeError, ZeroDivisionError) as error:
        raise ValueError(
            f"{key}: no model can be built of the config.json of {name!r} (with {overrides}): "
            f"{type(error).__name__}: {error}"
        ) from error
    names = ExpertNames(config.get_text_config().model_type)
    wanted: dict[str, tuple[int, ...]] = {}
    with StoredModel(model_path, partial(name_in_model, config=config)) as stored:
        in_files = stored.names
        if in_files is None:
            return
        _check_head(f"{key}: {name!r}", stored, wants_score=is_scalar(config), has_score=has_score)
        for parameter, tensor in named_tensors(model):
            shape = tuple(tensor.shape)
            if parameter == HEAD_WEIGHT and not has_score:
                continue
            if parameter in in_files:
                wanted[parameter] = shape
            else:
                wanted |= dict(names.as_in(in_files).split_meta(parameter, shape))
        found = {source: stored.tensor(source).get_shape() for source in wanted if source in in_files}
    missing, differing = shape_differences(found, wanted)
    if found and (missing or differing):
        lists = {"missing": missing, "of another shape": differing}
        raise ValueError(
            f"{key}: the weights of {name!r} do not match its config.json (with {overrides}):\n"
            + "\n".join(f"  {len(of)} tensors {what}: {some_of(of, 4)}" for what, of in lists.items() if of)
        )


def _check_head(model: str, stored: StoredModel, *, wants_score: bool, has_score: bool) -> None:
    """Check that the checkpoint has the head that the configuration asks for."""
    assert stored.names is not None
    has_head = HEAD_WEIGHT in stored.names
    if has_head and not wants_score:
        raise ValueError(
            f"{model} is a reward model: it holds {HEAD_WEIGHT}, and its config.json does not "
            "say so; name a language model"
        )
    if not wants_score:
        return
    others = foreign_heads(stored.names) + [HEAD_WEIGHT] * (has_head and not has_score)
    wrong = f"{model} is a reward checkpoint with the wrong head: "
    if others:
        raise ValueError(
            f"{wrong}its weights hold {some_of(others, 4)}; a reward model has one linear layer of one output, "
            f"{HEAD_WEIGHT}, and says so in the config.json (architectures: [...ForSequenceClassification]). Convert "
            "it, or name the language model it was made from"
        )
    if has_score and not has_head:
        raise ValueError(f"{wrong}{HEAD_WEIGHT} is not among its weights; copy it again or name another")
    shape = stored.tensor(HEAD_WEIGHT).get_shape() if has_head else [1]
    if shape[0] != 1:
        raise ValueError(f"{wrong}{HEAD_WEIGHT} is {shape}, which gives {shape[0]} numbers instead of one")


def check_fit(config: PolicyConfig, model: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that lengths, tensor parallelism and tokenizer fit the model.

    Raises:
        ValueError: naming the key to change and what would work.
    """
    sizes = model.get_text_config().to_dict()
    engine = config.generation.engine if isinstance(config, RolloutPolicyConfig) else None
    positions, heads = sizes.get("max_position_embeddings"), sizes.get("num_attention_heads")
    longest = config.key("max_total_sequence_length")
    asked = {longest: config.max_total_sequence_length}
    asked |= {} if engine is None else {engine.key(engine.length_key): engine.longest_sequence}
    # Long-context RoPE has more positions than max_position_embeddings.
    is_stretched = "factor" in (sizes.get("rope_parameters") or {})
    too_long = [f"{key}={value}" for key, value in asked.items() if positions is not None and value > positions]
    if too_long and not is_stretched:
        raise ValueError(
            f"{' and '.join(too_long)}: more than the {positions} positions of {config.model_name!r} "
            f"(max_position_embeddings in its config.json); set {longest}={positions} or less"
        )
    if engine is not None and heads is not None and heads % engine.tensor_size:
        raise ValueError(
            f"{engine.key(engine.tensor_key)}={engine.tensor_size} does not divide the "
            f"{heads} attention heads of {config.model_name!r}; these would: {divisors(heads)}"
        )
    vocab_size = model.get_text_config().vocab_size
    if len(tokenizer) > vocab_size:
        beyond = tokenizer.convert_ids_to_tokens(list(range(vocab_size, len(tokenizer)))[:3])
        raise ValueError(
            f"{config.tokenizer.key('name')}: {config.tokenizer.name!r} has {len(tokenizer)} tokens, more than the "
            f"{vocab_size} of {config.model_name!r}, which does not know {', '.join(map(repr, beyond))}: the two "
            "do not belong together, or tokenizer_config.json does not name the special tokens (pad_token, eos_token) "
            "that there are"
        )
