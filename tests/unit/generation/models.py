"""Models for the tests: untrained; one wide enough that ordinary products of its shapes depend on the batch."""

from pathlib import Path
from typing import Any


def make_model(directory: Path) -> str:
    """A float32 Qwen2 with tied embeddings and the tiny model's tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM

    from nemo_rl.data.tiny_model import build_tiny_tokenizer
    from tests.unit.policy.families import family_config

    tokenizer = build_tiny_tokenizer()
    pad, eos = (tokenizer.convert_tokens_to_ids([token])[0] for token in ("<pad>", "<eos>"))
    shape = {"hidden_size": 448, "intermediate_size": 1600, "num_attention_heads": 7, "num_key_value_heads": 1}
    shape |= {"max_position_embeddings": 2048, "initializer_range": 0.06, "vocab_size": len(tokenizer)}
    config = family_config("qwen2", **shape, bos_token_id=None, eos_token_id=eos, pad_token_id=pad)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)


def make_model_with_heads(directory: Path, family: str = "glm4_moe", **changes: Any) -> str:
    """With a prediction head (MTP), which sees only the token before and so guesses some tokens."""
    import torch
    from safetensors.torch import load_file, save_file

    from nemo_rl.models.policy.dtensor.draft import prediction_names
    from tests.unit.policy.families import save_random_model

    model = save_random_model(family, directory, num_nextn_predict_layers=1, mtp_num_hidden_layers=1, **changes)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    writes = [name for name in tensors if name.endswith(("o_proj.weight", "down_proj.weight"))]
    tensors |= {name: tensors[name] * 0.3 for name in writes}
    tensors["model.embed_tokens.weight"] *= 10
    last, names = "model.layers.1.", prediction_names(model.config)
    own = {names["block"] + name.removeprefix(last): tensors[name] for name in tensors if name.startswith(last)}
    own |= {name: torch.zeros_like(own[name]) for name in own if name.endswith(("o_proj.weight", "down_proj.weight"))}
    width = model.config.hidden_size
    own |= {f"{names[norm]}weight": torch.ones(width) for norm in ("enorm", "hnorm")}
    own[f"{names['norm']}weight"] = tensors["model.norm.weight"].clone()
    own[f"{names['eh_proj']}weight"] = torch.cat([torch.eye(width), torch.zeros(width, width)], dim=1)
    every = {name: tensor.to(model.dtype, copy=True) for name, tensor in (tensors | own).items()}
    save_file(every, file, metadata={"format": "pt"})
    return str(directory)
