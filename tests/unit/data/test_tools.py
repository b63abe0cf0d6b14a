"""Tools of rows: in the prompt, in the metadata, and where they come from."""

import json

import pytest

from nemo_rl.data.interfaces import TaskDataSpec, as_tools
from nemo_rl.data.rows.processors import conversation_processor, math_data_processor, math_hf_data_processor
from tests.unit.data.templates import IN_BRACKETS, chat, tokenizer_with

TOOLS = "{%- for tool in tools or [] -%}{{- '[tool]' + (tool | tojson) -}}{%- endfor -%}"
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
ANSWERED = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
ROW = {"problem": "1+1", "expected_answer": "2", "messages": ANSWERED}


def prompt(row, spec=None, processor=math_hf_data_processor):
    datum = processor(row, spec or TaskDataSpec("t"), tokenizer_with(chat(IN_BRACKETS, "[assistant]", TOOLS)), None, 0)
    return "".join(message["content"] for message in datum["message_log"]), datum["extra_env_info"]


@pytest.mark.parametrize("processor", [math_hf_data_processor, math_data_processor, conversation_processor])
@pytest.mark.parametrize("given", [[TOOL], json.dumps([TOOL]), [{**TOOL, "strict": None}]])
def test_tools_of_a_row_are_shown_to_the_model_and_handed_to_the_environment(processor, given):
    text, metadata = prompt({**ROW, "tools": given}, processor=processor)
    assert text.startswith("[tool]{") and '"add"' in text and text.endswith("[user]1+1<eos>[assistant]")
    assert metadata["tools"] == [TOOL]


def test_rows_without_tools_have_those_of_the_file(tmp_path):
    (tmp_path / "tools.json").write_text(json.dumps([TOOL]))
    spec = TaskDataSpec("t", tools_file=tmp_path / "tools.json")
    text, metadata = prompt(ROW, spec)
    assert '"add"' in text and metadata["tools"] == [TOOL]
    other = {"type": "function", "function": {"name": "other"}}
    text, metadata = prompt({**ROW, "tools": [other]}, spec)
    assert '"add"' not in text and metadata["tools"] == [other]


@pytest.mark.parametrize("wrong", ["{", ["add"], {"name": "add"}])
def test_what_is_no_list_of_tools_is_refused(wrong):
    with pytest.raises(ValueError, match="column 'tools'"):
        as_tools(wrong, "column 'tools'")
