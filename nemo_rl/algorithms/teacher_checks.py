"""Whether a teacher's distributions can be compared with a student's, token by token. Needs no weights."""

from __future__ import annotations

import json
import logging
from itertools import zip_longest
from typing import Any

from transformers import PretrainedConfig, PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

MAX_LISTED = 3
NAMED_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
OTHER_TEACHER = "set teacher.model_name to a model with the student's tokenizer, such as a larger one of its family"


def check_teacher(
    student_tokenizer: PreTrainedTokenizerFast,
    teacher_tokenizer: PreTrainedTokenizerFast,
    student_config: PretrainedConfig,
    teacher_config: PretrainedConfig,
    topk: int | None,
) -> int:
    """How many tokens, the first of the vocabulary, are compared: all that the student's tokenizer has.

    Every token of the student must be the same token of the teacher, and text must be cut into them by the same merges.
    A teacher may know more tokens, after those; the student never samples them. Heads may be larger than both
    vocabularies: checkpoints pad them. What else differs, special tokens by role and chat templates as between a base
    model and its chat model, is logged as a warning.

    Args:
        topk: `distillation.topk_logits_k`; None when whole distributions are compared.

    Raises:
        ValueError: saying what differs, and what to change.
    """
    student, teacher = _tokens(student_tokenizer), _tokens(teacher_tokenizer)
    _check_tokens(student, teacher)
    _check_merges(student_tokenizer, teacher_tokenizer)
    num_tokens = max(student) + 1
    for key, config in {"policy": student_config, "teacher": teacher_config}.items():
        rows = config.get_text_config().vocab_size
        if rows < num_tokens:
            raise ValueError(
                f"{key}.model_name: the head of this {config.model_type} model has {rows} rows (vocab_size in its "
                f"config.json), but the student's tokenizer has {num_tokens} tokens; the tokenizer belongs to another "
                f"model: set {key}.model_name and {key}.tokenizer.name to the same one"
            )
    if topk is not None and not 1 <= topk <= num_tokens:
        raise ValueError(
            f"distillation.topk_logits_k={topk}: the vocabulary has {num_tokens} tokens; set it to one of 1 to "
            f"{num_tokens}"
        )
    _warn_of_the_rest(student_tokenizer, teacher_tokenizer)
    num_more = sum(number >= num_tokens for number in teacher)
    if num_more:
        logger.warning("the teacher has %d tokens more than the student; they are left out of the comparison", num_more)
    return num_tokens


def _tokens(tokenizer: PreTrainedTokenizerFast) -> dict[int, str]:
    return {number: token for token, number in tokenizer.get_vocab().items()}


def _check_tokens(student: dict[int, str], teacher: dict[int, str]) -> None:
    differing = [number for number in sorted(student) if student[number] != teacher.get(number)]
    if not differing:
        return
    listed = "".join(
        f"\n  token {number}: student {student[number]!r}, teacher {_shown(teacher, number)}"
        for number in differing[:MAX_LISTED]
    )
    num_absent = sum(number not in teacher for number in differing)
    absent = f" ({num_absent} of them the teacher does not have)" if num_absent else ""
    raise ValueError(
        f"teacher.tokenizer.name: {len(differing)} of the student's {len(student)} tokens are others for the teacher"
        f"{absent}, so the two distributions are not of the same things:{listed}\n{OTHER_TEACHER}"
    )


def _shown(tokens: dict[int, str], number: int) -> str:
    return repr(tokens[number]) if number in tokens else "none"


def _check_merges(student: PreTrainedTokenizerFast, teacher: PreTrainedTokenizerFast) -> None:
    models = [json.loads(tokenizer.backend_tokenizer.to_str())["model"] for tokenizer in (student, teacher)]
    if models[0]["type"] != models[1]["type"]:
        raise ValueError(
            f"teacher.tokenizer.name: the tokens are the same, but the student's tokenizer is a {models[0]['type']} "
            f"and the teacher's a {models[1]['type']}, which cut text differently; {OTHER_TEACHER}"
        )
    pairs = list(zip_longest(*(_merges(model) for model in models)))
    differing = [(number, *pair) for number, pair in enumerate(pairs) if pair[0] != pair[1]]
    if not differing:
        return
    listed = "".join(
        f"\n  merge {number}: student {ours!r}, teacher {theirs!r}" for number, ours, theirs in differing[:MAX_LISTED]
    )
    raise ValueError(
        f"teacher.tokenizer.name: the tokens are the same, but {len(differing)} of {len(pairs)} merges differ, so the "
        f"teacher knows the same text as other tokens than the student writes:{listed}\n{OTHER_TEACHER}"
    )


def _merges(model: dict[str, Any]) -> list[str]:
    """In their order; none where the tokenizer is not made of merges."""
    return [" ".join(pair) for pair in model.get("merges", [])]


def _warn_of_the_rest(student: PreTrainedTokenizerFast, teacher: PreTrainedTokenizerFast) -> None:
    roles = {role: (getattr(student, role), getattr(teacher, role)) for role in NAMED_TOKENS}
    differing = [f"{role} {ours!r} and {theirs!r}" for role, (ours, theirs) in roles.items() if ours != theirs]
    if differing:
        logger.warning(
            "student and teacher use different special tokens: %s. The student stops at its own; a teacher that ends "
            "its answers otherwise teaches it to",
            ", ".join(differing),
        )
    if student.chat_template != teacher.chat_template:
        logger.warning(
            "student and teacher have different chat templates: the teacher judges prompts in the student's format"
        )
