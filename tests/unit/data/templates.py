"""Chat templates in the manners of well-known ones, and a tokenizer that knows their marks."""

from nemo_rl.data.chat.template import ChatTemplate, plain_message
from nemo_rl.data.tiny_model import CHAT_TEMPLATE, build_tiny_tokenizer

MARKS = ("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|begin_of_text|>")


def chat(message: str, header: str = "", begin: str = "") -> str:
    """The template that writes `begin`, each message `m` and, where an answer is to come, its header."""
    prompt = f"{{%- if add_generation_prompt -%}}{{{{- '{header}' -}}}}{{%- endif -%}}" if header else ""
    return f"{begin}{{%- for m in messages -%}}{message}{{%- endfor -%}}{prompt}"


def in_blocks(content: str) -> str:
    """Answers in generation blocks."""
    block = f"{{%- generation -%}}{content}{{%- endgeneration -%}}"
    return f"{{%- if m.role == 'assistant' -%}}{block}{{%- else -%}}{content}{{%- endif -%}}"


IN_BRACKETS = "{{- '[' + m.role + ']' + m.content + '<eos>' -}}"
CHATML_ROLE, CHATML_TEXT = "{{- '<|im_start|>' + m.role + '\\n' -}}", "{{- m.content + '<|im_end|>' -}}"
CHATML_HEADER, NEWLINE = "<|im_start|>assistant\\n", "{{- '\\n' -}}"
LLAMA3_ROLE = "{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' -}}"
LLAMA3_TEXT, LLAMA3_BEGIN = "{{- m.content | trim + '<|eot_id|>' -}}", "{{- '<|begin_of_text|>' -}}"
LLAMA3_HEADER = "<|start_header_id|>assistant<|end_header_id|>\\n\\n"

TEMPLATES = {
    "plain": CHAT_TEMPLATE,
    "default_system": chat(
        IN_BRACKETS + NEWLINE,
        "[assistant]",
        "{%- if messages[0].role != 'system' -%}{{- '[system]be good\\n' -}}{%- endif -%}",
    ),
    # forgets the thoughts of earlier turns
    "forgetful": chat(
        "{{- '[' + m.role + ']' -}}"
        "{%- if m.role == 'assistant' and not loop.last -%}{{- m.content.split('</think>')[-1] -}}"
        "{%- else -%}{{- m.content -}}{%- endif -%}{{- '<eos>' -}}",
        "[assistant]",
    ),
    "demands_a_user": chat(
        IN_BRACKETS,
        "[assistant]",
        "{%- if messages | selectattr('role', 'equalto', 'user') | list | length == 0 -%}"
        "{{- raise_exception('no user') -}}{%- endif -%}",
    ),
    "chatml": chat(CHATML_ROLE + CHATML_TEXT + NEWLINE, CHATML_HEADER),
    "chatml_blocks": chat(CHATML_ROLE + in_blocks(CHATML_TEXT) + NEWLINE, CHATML_HEADER),
    "llama3": chat(LLAMA3_ROLE + LLAMA3_TEXT, LLAMA3_HEADER, LLAMA3_BEGIN),
    "llama3_blocks": chat(LLAMA3_ROLE + in_blocks(LLAMA3_TEXT), LLAMA3_HEADER, LLAMA3_BEGIN),
    # shows an empty thought in the last answer only, and tool calls
    "thinking": chat(
        CHATML_ROLE + "{%- set text = m.content.split('</think>')[-1].lstrip('\\n') -%}"
        "{%- if m.role == 'assistant' and loop.last -%}{{- '<think>\\n' -}}"
        "{%- if '</think>' in m.content -%}"
        "{{- m.content.split('</think>')[0].replace('<think>', '').strip('\\n') -}}{%- endif -%}"
        "{{- '\\n</think>\\n' -}}{%- endif -%}{{- text -}}"
        "{%- for call in m.tool_calls or [] -%}"
        "{{- '<tool_call>' + (call.function | tojson) + '</tool_call>' -}}{%- endfor -%}"
        "{{- '<|im_end|>\\n' -}}",
        CHATML_HEADER,
    ),
    # the system prompt stands in the last user message
    "system_in_last_user": chat(
        "{%- if m.role == 'user' -%}{{- '[INST]' -}}"
        "{%- if messages[0].role == 'system' and m == last -%}{{- messages[0].content + '\\n' -}}{%- endif -%}"
        "{{- m.content + '[/INST]' -}}"
        "{%- elif m.role == 'assistant' -%}{{- m.content + '<eos>' -}}{%- endif -%}",
        begin="{%- set last = (messages | selectattr('role', 'equalto', 'user') | list)[-1] -%}",
    ),
}

TOOL_NAMES = "{%- for tool in tools or [] -%}{{- tool.name + ';' -}}{%- endfor -%}"
TOOLS = TOOL_NAMES.replace("tool.name + ';'", "'[tool]' + (tool | tojson)") + chat(IN_BRACKETS, "[assistant]")
CALLS_OR_CONTENT = chat(  # CALLS: how the calls are written
    CHATML_ROLE + "{%- if m.tool_calls -%}{{- '<tool_call>' + CALLS -}}{%- else -%}{{- m.content -}}{%- endif -%}"
    "{{- '<|im_end|>\\n' -}}",
    CHATML_HEADER + "<think>\\n",
)
TEMPLATES_OF_FEW_ROLES = {
    "only_users": chat(
        "{%- if m.role not in ('user', 'assistant') -%}{{- raise_exception('role') -}}{%- endif -%}" + IN_BRACKETS,
        "[assistant]",
    ),
    # as Qwen 3
    "tools_as_users": chat(
        "{%- if m.role == 'tool' -%}"
        "{{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' -}}"
        f"{{%- else -%}}{CHATML_ROLE + CHATML_TEXT + NEWLINE}{{%- endif -%}}",
        CHATML_HEADER,
    ),
    # as GLM 4: the header of the next speaker ends a turn
    "next_header_ends": chat(
        "{{- ('<|im_start|>' if m.role == 'user' else '<|im_end|>') + m.content -}}", "<|im_end|>", LLAMA3_BEGIN
    ),
}


def tokenizer_with(template):
    tokenizer = build_tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS)}, replace_extra_special_tokens=False)
    tokenizer.chat_template = template
    return tokenizer


def render_chat(messages, tokenizer, *, add_generation_prompt=False, tools=None, chat_template_kwargs=None):
    """The conversation as text."""
    template = ChatTemplate(tokenizer, tools, chat_template_kwargs or {})
    return template.render([plain_message(message) for message in messages], prompt=add_generation_prompt)[0]
