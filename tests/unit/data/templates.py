"""Chat templates in the manners of well-known ones, and a tokenizer that knows their marks."""

from nemo_rl.data.chat.template import ChatTemplate, plain_message
from nemo_rl.data.tiny_model import CHAT_TEMPLATE, build_tiny_tokenizer

MARKS = ("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|begin_of_text|>")

TEMPLATES = {
    "plain": CHAT_TEMPLATE,
    "default_system": (
        "{%- if messages[0].role != 'system' -%}{{- '[system]be good\\n' -}}{%- endif -%}"
        "{%- for m in messages -%}{{- '[' + m.role + ']' + m.content + '<eos>\\n' -}}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '[assistant]' -}}{%- endif -%}"
    ),
    # forgets the thoughts of earlier turns
    "forgetful": (
        "{%- for m in messages -%}{{- '[' + m.role + ']' -}}"
        "{%- if m.role == 'assistant' and not loop.last -%}{{- m.content.split('</think>')[-1] -}}"
        "{%- else -%}{{- m.content -}}{%- endif -%}{{- '<eos>' -}}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '[assistant]' -}}{%- endif -%}"
    ),
    "demands_a_user": (
        "{%- if messages | selectattr('role', 'equalto', 'user') | list | length == 0 -%}"
        "{{- raise_exception('no user') -}}{%- endif -%}"
        "{%- for m in messages -%}{{- '[' + m.role + ']' + m.content + '<eos>' -}}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '[assistant]' -}}{%- endif -%}"
    ),
    "chatml": (
        "{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
    ),
    "chatml_blocks": (
        "{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\\n' -}}{%- if m.role == 'assistant' -%}"
        "{%- generation -%}{{- m.content + '<|im_end|>' -}}{%- endgeneration -%}"
        "{%- else -%}{{- m.content + '<|im_end|>' -}}{%- endif -%}{{- '\\n' -}}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
    ),
    "llama3": (
        "{{- '<|begin_of_text|>' -}}{%- for m in messages -%}"
        "{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' -}}"
        "{%- endfor -%}{%- if add_generation_prompt -%}"
        "{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}"
    ),
    "llama3_blocks": (
        "{{- '<|begin_of_text|>' -}}{%- for m in messages -%}"
        "{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' -}}{%- if m.role == 'assistant' -%}"
        "{%- generation -%}{{- m.content | trim + '<|eot_id|>' -}}{%- endgeneration -%}"
        "{%- else -%}{{- m.content | trim + '<|eot_id|>' -}}{%- endif -%}"
        "{%- endfor -%}{%- if add_generation_prompt -%}"
        "{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}"
    ),
    # shows an empty thought in the last answer only, and tool calls
    "thinking": (
        "{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\\n' -}}"
        "{%- set text = m.content.split('</think>')[-1].lstrip('\\n') -%}"
        "{%- if m.role == 'assistant' and loop.last -%}{{- '<think>\\n' -}}"
        "{%- if '</think>' in m.content -%}"
        "{{- m.content.split('</think>')[0].replace('<think>', '').strip('\\n') -}}{%- endif -%}"
        "{{- '\\n</think>\\n' -}}{%- endif -%}{{- text -}}"
        "{%- for call in m.tool_calls or [] -%}"
        "{{- '<tool_call>' + (call.function | tojson) + '</tool_call>' -}}{%- endfor -%}"
        "{{- '<|im_end|>\\n' -}}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
    ),
    # the system prompt stands in the last user message
    "system_in_last_user": (
        "{%- set last = (messages | selectattr('role', 'equalto', 'user') | list)[-1] -%}"
        "{%- for m in messages -%}{%- if m.role == 'user' -%}{{- '[INST]' -}}"
        "{%- if messages[0].role == 'system' and m == last -%}{{- messages[0].content + '\\n' -}}{%- endif -%}"
        "{{- m.content + '[/INST]' -}}"
        "{%- elif m.role == 'assistant' -%}{{- m.content + '<eos>' -}}{%- endif -%}{%- endfor -%}"
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
