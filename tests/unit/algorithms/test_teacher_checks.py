import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen2Config

from nemo_rl.algorithms.setup.distillation import check_teacher
from nemo_rl.data.tiny_model import build_tiny_tokenizer

TOKENS = ["<pad>", "<eos>", "a", "b", "c", "ab", "bc"]
MERGES = [("a", "b"), ("b", "c")]


def tokenizer_of(tokens: list[str] = TOKENS, merges: list[tuple[str, str]] = MERGES) -> PreTrainedTokenizerFast:
    vocabulary = {token: number for number, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>", chat_template="{{ messages }}"
    )


def config_of(vocab_size: int) -> Qwen2Config:
    return Qwen2Config(vocab_size=vocab_size)


def check(
    student: PreTrainedTokenizerFast,
    teacher: PreTrainedTokenizerFast,
    sizes: tuple[int, int] = (8, 16),
    topk: int | None = 4,
) -> int:
    return check_teacher(student, teacher, config_of(sizes[0]), config_of(sizes[1]), topk)


def test_heads_padded_to_different_sizes_go_together(caplog: pytest.LogCaptureFixture):
    assert check(tokenizer_of(), tokenizer_of(), topk=7) == 7
    assert check(tokenizer_of(), tokenizer_of(), topk=None) == 7
    tiny = build_tiny_tokenizer()
    assert check(tiny, build_tiny_tokenizer(), (len(tiny), 320), 64) == len(tiny)
    assert not caplog.records


def test_another_vocabulary_is_explained_by_its_first_differences():
    teacher = tokenizer_of(["<pad>", "<eos>", "b", "a", "c", "ab", "bc"])
    with pytest.raises(ValueError) as error:
        check(tokenizer_of(), teacher)
    assert str(error.value) == (
        "teacher.tokenizer.name: 2 of the student's 7 tokens are others for the teacher, so the two distributions are "
        "not of the same things:\n"
        "  token 2: student 'a', teacher 'b'\n"
        "  token 3: student 'b', teacher 'a'\n"
        "set teacher.model_name to a model with the student's tokenizer, such as a larger one of its family"
    )
    tiny = build_tiny_tokenizer()
    with pytest.raises(ValueError, match=rf"{len(tiny) - 2} of the student's {len(tiny)} tokens") as error:
        check(tiny, tokenizer_of(), (300, 300))
    assert str(error.value).count("\n  token ") == 3


def test_tokens_that_the_teacher_does_not_have_are_refused_and_those_it_has_more_are_left_out(caplog):
    more = tokenizer_of()
    more.add_tokens(["<think>", "</think>"])
    with pytest.raises(
        ValueError, match=r"2 of the student's 9 tokens .*\(2 of them the teacher does not have\)"
    ) as error:
        check(more, tokenizer_of(), (16, 16))
    assert "token 7: student '<think>', teacher none" in str(error.value)
    assert check(tokenizer_of(), more) == 7
    assert "the teacher has 2 tokens more" in caplog.text


def test_the_same_tokens_by_other_merges_are_refused():
    with pytest.raises(ValueError, match=r"2 of 2 merges differ.*\n  merge 0: student 'a b', teacher 'b c'"):
        check(tokenizer_of(), tokenizer_of(merges=MERGES[::-1]))
    with pytest.raises(ValueError, match=r"1 of 2 merges differ.*\n  merge 1: student 'b c', teacher None"):
        check(tokenizer_of(), tokenizer_of(merges=MERGES[:1]))
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({t: i for i, t in enumerate(TOKENS)})))
    with pytest.raises(ValueError, match="the student's tokenizer is a BPE and the teacher's a WordLevel"):
        check(tokenizer_of(), words)


@pytest.mark.parametrize("topk", [0, 8])
def test_more_logits_than_tokens_are_refused(topk: int):
    with pytest.raises(ValueError, match=rf"distillation\.topk_logits_k={topk}: the vocabulary has 7 tokens.* 1 to 7"):
        check(tokenizer_of(), tokenizer_of(), topk=topk)
