"""A model for the tests: untrained, and wide enough that ordinary products of its shapes depend on the batch."""

from pathlib import Path


def make_model(directory: Path) -> str:
    """A float32 Qwen2 with tied embeddings and the tiny model's tokenizer."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from nemo_rl.data.tiny_model import build_tiny_tokenizer

    tokenizer = build_tiny_tokenizer()
    pad, eos = (tokenizer.convert_tokens_to_ids([token])[0] for token in ("<pad>", "<eos>"))
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=448,
        intermediate_size=1600,
        num_hidden_layers=2,
        num_attention_heads=7,
        num_key_value_heads=1,
        max_position_embeddings=2048,
        initializer_range=0.06,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=pad,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(config)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)
