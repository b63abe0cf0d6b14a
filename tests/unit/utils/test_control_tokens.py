"""Control tokens that people and tools write are text."""

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from nemo_rl.utils.control_tokens import hide, restore, tokenise

CONTROL = ["<|im_start|>", "<|im_end|>", "[END]"]
PIECES = ["<unk>", *CONTROL, "▁", *"abim_starend<|>[]END/", "▁a", "a<", "<|", "|>", "<|im", "ab"]


def tokenizer_of(kind):
    """Tokenizers that begin every text, the first text or no text with a space, and one whose end eats white space."""
    if kind in ("bytes", "stripping"):
        vocab = dict.fromkeys([*CONTROL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "<|", "|>", "a<"])
        merges = [("<", "|"), ("|", ">"), ("a", "<")]
        made = Tokenizer(models.BPE({token: i for i, token in enumerate(vocab)}, merges))
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
    else:
        made = Tokenizer(models.Unigram([(piece, -float(i)) for i, piece in enumerate(dict.fromkeys(PIECES))], 0))
        if kind == "every":
            made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        else:
            made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokens = [AddedToken(token, special=True, normalized=False, rstrip=kind == "stripping") for token in CONTROL]
    made.add_special_tokens(tokens)
    return PreTrainedTokenizerFast(tokenizer_object=made, extra_special_tokens=tokens)


TEXTS = [
    "<|im_end|>",
    "a<|im_end|>b",
    " a <|im_start|>[END]",
    "<<|im_end|>|im_end|>",
    "[END]a",
    "ab",
    "\ufdd0|im_end|>",
]


@pytest.mark.parametrize("kind", ["bytes", "stripping", "every", "first"])
@pytest.mark.parametrize("text", TEXTS)
def test_a_control_token_in_a_message_is_text_and_one_of_the_template_is_none(kind, text):
    """The message alone has the tokens of `split_special_tokens`, and everything around it those of the template."""
    tokenizer, written = tokenizer_of(kind), text.replace("\ufdd0", "<")
    control = {tokenizer.convert_tokens_to_ids(token): token for token in CONTROL}
    hidden = hide(text, tokenizer)
    assert restore(hidden, tokenizer) == written and hide(hidden, tokenizer) == hidden
    alone, _ = tokenise(hidden, tokenizer)
    if kind in ("bytes", "stripping"):
        assert alone == tokenizer(written, add_special_tokens=False, split_special_tokens=True)["input_ids"]

    around = "<|im_start|>{}<|im_end|> a<|im_start|>a"
    ids, starts = tokenise(around.format(hidden), tokenizer)
    places = [start for token, start in zip(ids, starts, strict=True) if token in control]
    assert places == [0, 12 + len(hidden), len(hidden) + 24] and starts == sorted(starts)
    behind = ids[[control.get(token) for token in ids].index("<|im_end|>") :]
    as_text = tokenizer.convert_ids_to_tokens(ids[1 : len(ids) - len(behind)])
    if kind in ("every", "first"):
        leading = "▁" if kind == "every" else ""
        assert "".join(as_text) == leading + written.replace(" ", "▁")
    same = tokenizer(around.format("ab"), add_special_tokens=False)["input_ids"]
    assert same[-len(behind) :] == behind


def test_control_tokens_are_hidden_in_everything_that_a_template_may_write():
    tokenizer = tokenizer_of("bytes")
    parts = [{"type": "text", "text": "a<|im_"}, {"type": "image"}, {"type": "text", "text": "end|>"}]
    message = {"role": "tool", "name": "[END]", "content": parts, "calls": ({"id": "<|im_end|>", "number": 1},)}
    hidden = hide(message, tokenizer)
    texts = [hidden["name"], "".join(part.get("text", "") for part in hidden["content"]), hidden["calls"][0]["id"]]
    assert not any(token in text for token in CONTROL for text in texts)
    assert [restore(text, tokenizer) for text in texts] == ["[END]", "a<|im_end|>", "<|im_end|>"]
    assert hidden["content"][1] == {"type": "image"} and hidden["calls"][0]["number"] == 1
