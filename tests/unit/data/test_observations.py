"""The model sees conversations of several turns as the chat template writes them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.algorithms.parts.prompts import check_turns
from nemo_rl.data.chat.messages import ObservationRenderer
from tests.unit.data.templates import TEMPLATES, TEMPLATES_OF_FEW_ROLES, render_chat, tokenizer_with

ALL = TEMPLATES | TEMPLATES_OF_FEW_ROLES
ENDS = dict.fromkeys(["plain", "default_system", "demands_a_user", "only_users", "system_in_last_user"], "<eos>")
ENDS |= {"llama3": "<|eot_id|>", "next_header_ends": "<|im_start|>"}
ENDS |= dict.fromkeys(["chatml", "tools_as_users"], "<|im_end|>")
words = st.text(st.sampled_from("ab1<>é "), min_size=1, max_size=6).map(lambda text: f"x{text}y")
turn = st.tuples(words, st.booleans(), st.sampled_from(["environment", "tool", "user"]), words)


@pytest.mark.parametrize(("name", "end"), ENDS.items())
def test_the_model_sees_what_the_template_writes_in_every_turn(name, end):
    """Whether the model ended a turn itself or a stop string did."""
    tokenizer = tokenizer_with(ALL[name])
    render = ObservationRenderer(tokenizer)

    def tokens(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    @settings(max_examples=8, deadline=None)
    @given(st.lists(turn, min_size=1, max_size=3))
    def check(turns: list[tuple[str, bool, str, str]]) -> None:
        conversation = [{"role": "user", "content": "start"}]
        seen = tokens(render_chat(conversation, tokenizer, add_generation_prompt=True))
        for answer, ended, role, said in turns:
            role = "user" if name == "next_header_ends" else role
            sampled = tokens(answer + end if ended else answer)
            seen = seen + sampled + render({"role": role, "content": said}, sampled=sampled)[0]
            conversation += [{"role": "assistant", "content": answer}, {"role": render.role(role), "content": said}]
            text = render_chat(conversation, tokenizer, add_generation_prompt=True)
            assert tokenizer.decode(seen) == text and seen == tokens(text)

    check()


def test_a_tool_speaks_as_a_tool_where_the_template_knows_tools():
    said = {"role": "tool", "content": "42 "}
    shown = {}
    for name in ("tools_as_users", "chatml", "only_users"):
        tokenizer = tokenizer_with(ALL[name])
        shown[name] = tokenizer.decode(ObservationRenderer(tokenizer)(said, sampled=[])[0])
    assert "<tool_response>\n42 \n</tool_response>" in shown["tools_as_users"]
    assert "<|im_start|>tool\n42 " in shown["chatml"] and "[user]42 " in shown["only_users"]


def test_raw_text_joins_the_tokens_as_it_is():
    """As NeMo RL appends observations: the environment writes the end of the turn and the next header, if it wants."""
    tokenizer = tokenizer_with(ALL["chatml"])
    said = {"role": "environment", "content": "<|im_end|>\n<|im_start|>user\n 42<|im_end|>\n<|im_start|>assistant\n"}
    for text in (said["content"], " 42 "):
        shown = ObservationRenderer(tokenizer)({**said, "content": text}, sampled=[7], raw_text=True)
        assert shown.token_ids == tokenizer(text, add_special_tokens=False)["input_ids"] and shown.text == text


@pytest.mark.parametrize(("name", "what"), [("forgetful", "the thoughts of earlier turns"), ("thinking", "")])
def test_a_template_that_rewrites_earlier_turns_is_told_of_in_runs_of_several_turns(name, what, caplog):
    check_turns(tokenizer_with(TEMPLATES[name]))
    assert f"the chat template writes {what}" in caplog.text and "<think>" in caplog.text
    assert "policy.tokenizer.chat_template" in caplog.text


def test_a_template_of_one_turn_is_refused_for_several():
    once = "{%- if messages | length > 1 -%}{{- raise_exception('once') -}}{%- endif -%}{{- messages[0].content -}}"
    with pytest.raises(ValueError, match="allows further turns"):
        check_turns(tokenizer_with(once))
