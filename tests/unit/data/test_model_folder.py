"""GGUF files as models: weights as the package gguf reads them, and the tokenizer of the model behind the file."""

import socket
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from nemo_rl.data import model_folder
from nemo_rl.data.model_folder import resolve_model, unmade_config
from nemo_rl.utils.tokenizer import encode

HEADS, KV_HEADS = 4, 2
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEMO_RL_CACHE", str(tmp_path / "cache"))


def vocabulary() -> list[str]:
    return [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "ĠĠ"]


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(vocabulary()),
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=1,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            tie_word_embeddings=True,
        )
    )


def write(
    path: Path, *, kind: Type = Type.Q4_1, architecture: str = "llama", splitting: str = "smollm", parts: int = 1
):
    """Write `llama()` as llama.cpp does, and return its weights as gguf dequantises them, by Hugging Face name."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_context_length(256)
    writer.add_embedding_length(128)
    writer.add_feed_forward_length(256)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(32)
    writer.add_vocab_size(len(vocabulary()))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(splitting)
    writer.add_token_list(vocabulary())
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(vocabulary()) - len(SPECIAL)))
    writer.add_token_merges(["Ġ Ġ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    if parts > 1:
        writer.add_uint16("split.count", parts)
    expected = {}
    for name, tensor in llama().state_dict().items():
        values = tensor.numpy()
        in_file = name.replace("model.layers.0.", "blk.0.").replace("model.embed_tokens", "token_embd")
        in_file = in_file.replace("model.norm", "output_norm")
        for theirs, short in GGUF_NAMES.items():
            in_file = in_file.replace(theirs, short)
        if name == "lm_head.weight":  # tied
            continue
        if values.ndim == 1:
            writer.add_tensor(in_file, values)
            expected[name] = tensor
            continue
        packed = gguf.quantize(values, kind)
        expected[name] = torch.from_numpy(gguf.dequantize(packed, kind).copy())
        if "q_proj" in name or "k_proj" in name:  # pairs of rotary dimensions side by side
            heads = HEADS if "q_proj" in name else KV_HEADS
            packed = packed.reshape(heads, 2, -1, packed.shape[-1]).swapaxes(1, 2).reshape(packed.shape)
        writer.add_tensor(in_file, np.ascontiguousarray(packed), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


@pytest.mark.parametrize("kind", [Type.Q4_1, Type.Q8_0])
def test_weights_are_the_ones_that_gguf_reads(tmp_path, kind):
    path = tmp_path / "small.gguf"
    expected = write(path, kind=kind)
    folder = resolve_model(str(path))
    assert Path(folder).name.startswith("small-")
    assert resolve_model(str(path)) == folder
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.tie_word_embeddings
    assert model.dtype == torch.float32
    for name, tensor in expected.items():
        torch.testing.assert_close(model.state_dict()[name], tensor, rtol=0, atol=0, msg=name)


def test_the_configuration_is_known_without_making_the_model(tmp_path):
    path = tmp_path / "small.gguf"
    write(path)
    config = unmade_config(str(path))
    assert config is not None
    assert (config.hidden_size, config.num_key_value_heads, config.tie_word_embeddings) == (128, KV_HEADS, True)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("splitting", "tokens"), [("smollm", ["a", "ĠĠ", "3", "4"]), ("gpt-2", ["a", "Ġ", "Ġ", "3", "4"])]
)
def test_text_is_split_as_the_file_says(tmp_path, splitting, tokens):
    path = tmp_path / "small.gguf"
    write(path, splitting=splitting)
    tokenizer = AutoTokenizer.from_pretrained(resolve_model(str(path)))
    assert tokenizer.convert_ids_to_tokens(encode(tokenizer, "a  34")) == tokens
    assert tokenizer.chat_template == TEMPLATE
    assert (tokenizer.eos_token, encode(tokenizer, "<|im_end|>")) == ("<|im_end|>", [2])


def test_a_changed_file_is_another_model(tmp_path):
    path = tmp_path / "small.gguf"
    write(path)
    first = resolve_model(str(path))
    write(path, kind=Type.Q8_0)
    assert resolve_model(str(path)) != first


def test_a_process_that_was_killed_leaves_nothing_half(tmp_path, monkeypatch):
    path = tmp_path / "small.gguf"
    write(path)

    class Killed(BaseException):
        pass

    def dies(file: Path, target: Path) -> None:
        (target / "config.json").write_text("{}")
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(model_folder, "write_gguf", dies)
        resolve_model(str(path))
    left = tmp_path / "cache" / "gguf" / f"{Path(resolve_model(str(path))).name}.partial-left"
    left.mkdir()
    assert sorted(file.name for file in Path(resolve_model(str(path))).iterdir())[0] == "chat_template.jinja"


def cut(path: Path) -> None:
    write(path)
    path.write_bytes(path.read_bytes()[:9000])


def unknown_type(path: Path) -> None:
    write(path)
    name, dimensions = b"blk.0.ffn_up.weight", struct.pack("<IQQ", 2, 128, 256)
    head, tail = path.read_bytes().split(name + dimensions)
    path.write_bytes(head + name + dimensions + struct.pack("<I", 199) + tail[4:])


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "none": (lambda path: None, "does not exist"),
    "text": (lambda path: path.write_text("weights"), "is not a GGUF file"),
    "cut": (cut, "cannot be read"),
    "architecture": (lambda path: write(path, architecture="lloma"), "architecture lloma is not supported"),
    "splitting": (lambda path: write(path, splitting="porridge"), "unknown way .*'porridge'"),
    "part": (lambda path: write(path, parts=3), "one of 3 parts; join them"),
    "quantisation": (unknown_type, "199.* is not a valid GGMLQuantizationType"),
}


@pytest.mark.parametrize("case", BAD)
def test_files_that_cannot_be_read_are_refused_by_name(tmp_path, case):
    make, message = BAD[case]
    path = tmp_path / "small.gguf"
    make(path)
    with pytest.raises(ValueError, match=rf"GGUF file '.*small\.gguf'.*{message}"):
        resolve_model(str(path))
    assert not list((tmp_path / "cache").rglob("config.json"))


def test_without_a_network_a_model_of_the_hub_is_its_folder_in_the_cache(tmp_path, monkeypatch, caplog):
    snapshot = tmp_path / "hub" / "models--owner--name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (tmp_path / "hub" / "models--owner--name" / "refs").mkdir()
    (tmp_path / "hub" / "models--owner--name" / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    for name in ("HF_HUB_OFFLINE", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    with socket.socket() as closed:  # bound, and nobody listens
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
        assert resolve_model("owner/name") == str(snapshot)
        assert "so owner/name is taken from the cache" in caplog.text
        with pytest.raises(ValueError, match=r"'owner/other' is no folder here, and 127.0.0.1 cannot be reached"):
            resolve_model("owner/other")
