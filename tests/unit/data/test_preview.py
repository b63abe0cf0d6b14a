import io

import numpy as np
from rich.console import Console

from nemo_rl.algorithms.data_preview import PreviewInputs, PromptPreview, show_rows, token_text, token_texts
from nemo_rl.data.interfaces import TaskDataSpec
from nemo_rl.data.rows.processors import math_hf_data_processor
from nemo_rl.data.rows.setup import PromptProcessor, Task
from nemo_rl.data.tiny_model import build_tiny_tokenizer
from nemo_rl.types import Example, ExampleMeta, Prompt
from tests.unit.data.test_examples import prompt
from tests.unit.data.test_loss_masks import tokenizer_of

TOKENIZER = build_tiny_tokenizer()


def test_rows_are_shown_and_all_are_summed_up():
    lengths = [2, 12, 4, 8, 30]

    def make(prompt):
        name, length = prompt.prompt_id, lengths[prompt.idx]
        long = {"problem": f"row {name}: column messages is too long", "problem_kind": "too_long"} if length > 9 else {}
        meta = ExampleMeta(prompt_id=name, index=0, lengths=(length,), num_loss_tokens=1, **long)
        ids = np.array(TOKENIZER("11", add_special_tokens=False)["input_ids"])
        return [Example(sample_id="d:0", token_ids=ids, token_mask=np.array([False, True]))], meta

    prompts = [Prompt(prompt_id=f"d:{i}", row={}, idx=i, task_name="t") for i in range(5)]
    file = io.StringIO()
    inputs = PreviewInputs(prompts=prompts, total=50, make=make, tokenizer=TOKENIZER, note="a note")
    show_rows(Console(file=file, width=100), inputs, 2)
    text = file.getvalue()
    assert "d:0: 2 tokens, 1 of them carry loss\n1[1]\n" in text
    assert "left out (too_long): row d:1: column messages is too long" in text
    assert "row d:2 " not in text and "5 of 50 rows, 3 sequences" in text
    assert [int(cell) for cell in text.split("per sequence")[1].split("│")[1:7]] == [2, 2, 4, 8, 8, 8]
    assert "3 tokens carry loss, 21.4% of all" in text
    assert "2 rows are left out:\n  2 too_long, e.g. row d:1" in text and text.endswith("a note\n")


def test_a_prompt_is_shown_as_the_rollouts_see_it():
    task = Task(spec=TaskDataSpec("t"), processor=math_hf_data_processor, env_name="math")
    preview = PromptPreview(PromptProcessor({"t": task}, TOKENIZER, 8))
    rows = [{"problem": problem, "expected_answer": "3"} for problem in ("1+2", "1+2+3+4+5")]
    ((made,), meta), (_, long) = (preview(prompt(row)) for row in rows)
    assert token_text(made, TOKENIZER, coloured=False).plain == "<|user|>|1|+|2|<eos>|<|assistant|>"
    assert (meta.lengths, meta.num_loss_tokens, meta.problem) == ((6,), 0, None)
    said = "row rows:7 has 12 tokens, more than data.max_input_seq_length=8"
    assert (long.problem_kind, long.problem) == ("too_long", said)


def test_a_character_of_several_tokens_stands_at_the_last_of_them():
    tokenizer = tokenizer_of("")  # of bytes
    ids = tokenizer("a 你é🙂\ufffdb", add_special_tokens=False)["input_ids"]
    shown = token_texts(tokenizer, ids)
    assert shown == ["a", " ", *"\ufffd\ufffd你", *"\ufffdé", *"\ufffd\ufffd\ufffd🙂", *"\ufffd\ufffd\ufffd", "b"]
    spaced = build_tiny_tokenizer()
    assert token_texts(spaced, spaced("1+2", add_special_tokens=False)["input_ids"]) == ["1", "+", "2"]
