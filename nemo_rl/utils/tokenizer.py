"""The tokenizer of a run, with the chat template of its configuration."""

import logging
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, Protocol

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

PASSTHROUGH_TEMPLATE = "{%- for message in messages -%}{{- message['content'] -}}{%- endfor -%}"

TAKES_CONTROL_TOKENS = "{#- control tokens in contents are tokens -#}"  # in the template, which goes where it is used

TEMPLATE_TIME = datetime(2024, 7, 26)  # the date that templates of Llama 3.2 write if there is no clock


def strftime_now(format: str) -> str:
    """The clock of chat templates. It stands still, so that a row always has the same tokens."""
    return TEMPLATE_TIME.strftime(format)


def takes_control_tokens(chat_template: str) -> bool:
    """Whether a control token in a message is a token, rather than text, in conversations of this template.

    Without a template the messages are the whole text, with the control tokens of their author.
    """
    return TAKES_CONTROL_TOKENS in chat_template or chat_template.endswith(PASSTHROUGH_TEMPLATE)


class TokenizerSettings(Protocol):
    """The section `tokenizer` of a model."""

    def key(self, name: str) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def chat_template(self) -> str | None: ...
    @property
    def chat_template_kwargs(self) -> dict[str, Any] | None: ...
    @property
    def control_tokens_in_messages(self) -> Literal["text", "tokens"]: ...


def get_tokenizer(cfg: TokenizerSettings) -> PreTrainedTokenizerFast:
    """The fast tokenizer `cfg.name`, padding on the right, with a pad token and a chat template.

    `cfg.chat_template`: "default" is the tokenizer's own; None concatenates the contents of the messages; otherwise a
    Jinja text, or the path of a `.jinja` file. `chat_template_kwargs` become defaults inside the template, so that they
    apply wherever it is used, including saved checkpoints; so does `control_tokens_in_messages`. A missing pad token
    becomes the end-of-sequence token.

    Raises:
        ValueError: the tokenizer does not exist, is not a fast one, or lacks a vocabulary, an end-of-sequence token or
            a template.
        FileNotFoundError: a missing `.jinja` file.
    """
    from transformers import AutoTokenizer  # loads every model's configuration: not in processes that get a tokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(cfg.name)
    except (OSError, ValueError) as error:
        raise ValueError(f"{cfg.key('name')} {cfg.name!r} cannot be loaded: {error}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError(
            f"tokenizer {cfg.name!r} has no fast version ({type(tokenizer).__name__}), which is needed here"
        )
    if tokenizer.vocab_size <= len(tokenizer.all_special_tokens):  # transformers makes one without its files, too
        files = ", ".join(sorted(set(tokenizer.vocab_files_names.values())))
        raise ValueError(
            f"{cfg.key('name')}: {cfg.name!r} has no vocabulary ({files}); copy the tokenizer's files there, or name "
            "the model that has them"
        )
    if tokenizer.eos_token is None:
        raise ValueError(f"tokenizer {cfg.name!r} has no end-of-sequence token: set eos_token in tokenizer_config.json")
    if tokenizer.pad_token is None:
        logger.warning("tokenizer %s has no pad token: padding with %r", cfg.name, tokenizer.eos_token)
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "right"
    defaults = "".join(  # Jinja reads a value of YAML as Python writes it
        f"{{%- if {name} is not defined -%}}{{%- set {name} = {value!r} -%}}{{%- endif -%}}"
        for name, value in (cfg.chat_template_kwargs or {}).items()
    )
    mark = TAKES_CONTROL_TOKENS if cfg.control_tokens_in_messages == "tokens" else ""
    tokenizer.chat_template = mark + defaults + _template(cfg, tokenizer).replace(TAKES_CONTROL_TOKENS, "")
    return tokenizer


def _template(cfg: TokenizerSettings, tokenizer: PreTrainedTokenizerFast) -> str:
    if cfg.chat_template != "default":
        return template_text(cfg)
    if tokenizer.chat_template is None:
        raise ValueError(
            f"tokenizer {cfg.name!r} has no chat template: set {cfg.key('chat_template')} to a Jinja text or "
            "the path of a .jinja file, or to null to join the messages as they are"
        )
    return tokenizer.get_chat_template()


def template_text(cfg: TokenizerSettings) -> str:
    """The chat template that the configuration states, which is not `default`. Raises as `get_tokenizer`."""
    template = cfg.chat_template
    if template is None:
        return PASSTHROUGH_TEMPLATE
    if template.endswith(".jinja"):
        if not Path(template).is_file():
            raise FileNotFoundError(f"{cfg.key('chat_template')}: {template!r} does not exist (looked in {Path.cwd()})")
        return Path(template).read_text(encoding="utf-8")
    if "{" not in template:
        raise ValueError(
            f"{cfg.key('chat_template')} {template!r} is neither default, null, a .jinja file nor a Jinja text"
        )
    return template


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The tokens of a text, without special tokens around it."""
    token_ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return token_ids


def decode(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    """The text of sampled tokens, without end-of-sequence and other special tokens."""
    text = tokenizer.decode(list(token_ids), skip_special_tokens=True)
    assert isinstance(text, str)
    return text


def survives_text(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> bool:
    """Whether tokens, special ones aside, stay the same when they are decoded and tokenised again."""
    special = frozenset(tokenizer.all_special_ids)
    plain = [token for token in token_ids if token not in special]
    text = tokenizer.decode(plain, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return tokenizer.encode(text, add_special_tokens=False) == plain
