"""The folder of a model, from the name that a configuration gives it.

    Qwen/Qwen2.5-1.5B, models/mine   as they are
    tiny:arithmetic                  made on this machine (`data/tiny_model.py`)
    models/mine.Q4_K_M.gguf          dequantised, with its tokenizer and its chat template

The last two are made once, in the cache folder of this user.
"""

import copy
import logging
import struct
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import xxhash
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from tokenizers import pre_tokenizers
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedTokenizerFast,
)
from transformers.utils.quantization_config import GgufConfig

from nemo_rl.data.tiny_model import TINY_MODEL_PREFIX, resolve_tiny_model, tiny_model_config
from nemo_rl.utils.files import make_once
from nemo_rl.utils.folders import cache_root, hub_failure, hub_is_off, unreachable

logger = logging.getLogger(__name__)

GGUF_SUFFIX = ".gguf"

# How a byte-level tokenizer splits a text before it merges bytes: values of `tokenizer.ggml.pre`. transformers knows
# more of them, and splits as GPT-2 does for all the others.
SPLIT_AS_GPT2 = {"gpt-2", "mpt", "olmo", "phi-2"}
SPLIT_DIGITS_TOO = {"smollm", "starcoder", "refact", "command-r"}  # each digit is a piece of its own


def resolve_model(name: str) -> str:
    """The folder of the model `tiny:<recipe>` or of a GGUF file, made on first use; any other name unchanged.

    Without a network, a model of the hub is its folder in the cache.

    Raises:
        ValueError: an unknown recipe; a GGUF file that does not exist or cannot be read; or the name of a model of a
            hub that cannot be reached, and whose cache has no such model.
    """
    if name.startswith(TINY_MODEL_PREFIX):
        return resolve_tiny_model(name)
    if is_gguf(name):
        return resolve_gguf(Path(name).expanduser())
    if is_hub_name(name) and not Path(name).exists() and not hub_is_off() and (failure := hub_failure()) is not None:
        return _in_cache(name, failure)
    return name


def _in_cache(name: str, failure: str) -> str:
    """The folder of a model that the cache of the hub has. ValueError if it has not; `failure`: why the hub cannot."""
    try:
        folder = snapshot_download(name, local_files_only=True)
    except (LocalEntryNotFoundError, HFValidationError):
        raise ValueError(unreachable(name, failure)) from None
    logger.warning("%s, so %s is taken from the cache: %s", failure, name, folder)
    return folder


def is_hub_name(name: str) -> bool:
    """Whether a hub may have this name: `model` or `owner/model`. A folder may have it, too."""
    return not name.startswith((".", "/", "~")) and name.count("/") < 2


def unmade_config(name: str) -> PretrainedConfig | None:
    """The configuration of the model `tiny:<recipe>` or of a GGUF file, without making the model; None for others.

    Raises:
        ValueError: as `resolve_model`.
    """
    if name.startswith(TINY_MODEL_PREFIX):
        return tiny_model_config(name)
    if is_gguf(name):
        return gguf_config(Path(name).expanduser())
    return None


def is_gguf(name: str) -> bool:
    """Whether a configuration names a GGUF file. No model on the hub has such a name."""
    return name.endswith(GGUF_SUFFIX)


def resolve_gguf(path: Path) -> str:
    """The folder of the model in a GGUF file, named by the file and its content. It is made on first use."""
    target = cache_root() / "gguf" / f"{path.stem}-{_fingerprint(*_stamp(path))}"
    return str(make_once(target, partial(write_gguf, path)))


def write_gguf(path: Path, target: Path) -> None:
    """Write the model of a GGUF file as config.json, model.safetensors and the files of its tokenizer.

    Quantised weights become float32, and others keep their type. The format is llama.cpp's:
    https://github.com/ggml-org/ggml/blob/master/docs/gguf.md

    Raises:
        ValueError: the file is damaged or one of several parts; or transformers does not know its architecture, its
            quantisation or its tokenizer.
    """
    from gguf import GGUFReader  # a second, which only the first use of a file needs

    config = gguf_config(path)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"{str(path)!r} holds a {config.model_type!r} model, not a causal language model")
    with _readable(path):
        reader = GGUFReader(path)
        kinds = sorted({tensor.tensor_type.name for tensor in reader.tensors})
        if (parts := reader.get_field("split.count")) is not None and parts.contents() > 1:
            raise ValueError(f"it is one of {parts.contents()} parts; join them with llama-gguf-split --merge")
        logger.info("dequantising %s (%s) into %s (once; it may be deleted)", path, ", ".join(kinds), target.parent)
        source: dict[str, Any] = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
        tokenizer: Any = AutoTokenizer.from_pretrained(**source)
        splitting = reader.get_field("tokenizer.ggml.pre")
        _mend_splitting(tokenizer, None if splitting is None else splitting.contents())
        model = AutoModelForCausalLM.from_pretrained(**source, quantization_config=GgufConfig(dequantize=True))
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def gguf_config(path: Path) -> PretrainedConfig:
    """The configuration of the model in a GGUF file. ValueError if it cannot be read."""
    return copy.deepcopy(_gguf_config(*_stamp(path)))


@cache
def _gguf_config(path: Path, *_: int) -> PretrainedConfig:
    with _readable(path):
        return AutoConfig.from_pretrained(path.parent, gguf_file=path.name)


@cache
def _fingerprint(path: Path, *_: int) -> str:
    hasher = xxhash.xxh3_64()
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            hasher.update(block)
    return hasher.hexdigest()


def _stamp(path: Path) -> tuple[Path, int, int]:
    """A file as it is now: path, time of change in ns, and size in bytes. ValueError if it does not exist."""
    if not path.is_file():
        raise ValueError(f"the GGUF file {str(path)!r} does not exist (looked in {Path.cwd()})")
    status = path.stat()
    return path.absolute(), status.st_mtime_ns, status.st_size


@contextmanager
def _readable(path: Path) -> Generator[None]:
    try:
        yield
    except (ValueError, KeyError, IndexError, NotImplementedError, struct.error) as error:
        raise ValueError(
            f"the GGUF file {str(path)!r} cannot be read: {str(error).rstrip('.')}. Copy it again if it is damaged, or "
            "name the model that it was made from, a directory or a Hugging Face name with *.safetensors"
        ) from error


def _mend_splitting(tokenizer: PreTrainedTokenizerFast, splitting: str | None) -> None:
    """Have a byte-level tokenizer split text as the file says, where transformers splits as GPT-2 does."""
    backend = tokenizer.backend_tokenizer
    if not isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel) or splitting in SPLIT_AS_GPT2:
        return
    if splitting not in SPLIT_DIGITS_TOO:
        raise ValueError(f"its tokenizer splits text in an unknown way (tokenizer.ggml.pre is {splitting!r})")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
