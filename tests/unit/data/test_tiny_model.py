from dataclasses import replace
from pathlib import Path

import torch

from nemo_rl.data.datasets.arithmetic import arithmetic_space
from nemo_rl.data.tiny_model import CHAT_TEMPLATE, TinyModelRecipe, build_tiny_tokenizer, ensure_tiny_model

SHORT = TinyModelRecipe(num_clean_steps=2, num_doubtful_steps=1)


def files_of(directory: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(directory).iterdir()}


def test_same_recipe_gives_the_same_bytes_whatever_the_surroundings(tmp_path):
    first = files_of(ensure_tiny_model(tmp_path / "a", SHORT))
    torch.manual_seed(123)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    second = files_of(ensure_tiny_model(tmp_path / "b", SHORT))
    assert torch.get_num_threads() == 2
    torch.set_num_threads(num_threads)
    assert first == second != files_of(ensure_tiny_model(tmp_path / "c", replace(SHORT, seed=1)))


def test_a_small_float32_qwen2_whose_answers_are_right_in_a_third_to_a_half_of_the_problems(tiny_model_dir):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir, padding_side="left")
    assert (model.config.model_type, model.dtype) == ("qwen2", torch.float32)
    assert sum(p.numel() for p in model.parameters()) < 1_000_000
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert len(tokenizer) == model.config.vocab_size and tokenizer.chat_template == CHAT_TEMPLATE
    ids = tokenizer("<|user|>5+7<eos>\\boxed{1}")["input_ids"]
    assert ids == build_tiny_tokenizer()("<|user|>5+7<eos>\\boxed{1}")["input_ids"] and len(ids) == 8

    space = arithmetic_space(max_operand=9, operators="+-", split="all") * 3
    asked = [f"<|user|>{problem}<eos><|assistant|>" for problem, _ in space]
    batch = tokenizer(asked, return_tensors="pt", padding=True)
    torch.manual_seed(0)
    sampled = model.generate(**batch, max_new_tokens=8, do_sample=True, temperature=1.0, top_k=0)
    texts = tokenizer.batch_decode(sampled[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    correct = [text == f"\\boxed{{{value}}}" for text, (_, value) in zip(texts, space, strict=True)]
    assert 0.3 < sum(correct) / len(correct) < 0.55
