"""Reward functions: `(messages, metadata, **kwargs) -> float`, by name or by import path.

`messages` is the conversation: `role` and `content`, and `"sampled": True` on the turns that the policy wrote in this
episode. `response_text` is what it wrote. `metadata` comes from the row's processor, e.g. `{"ground_truth": "4"}`. A
function depends on its arguments alone and may be called from several threads at once.
The annotations of keyword arguments say which values the configuration accepts.
"""

import inspect
import json
import math
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Protocol, get_type_hints

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError

from nemo_rl.config.errors import did_you_mean
from nemo_rl.environments.math.verification import TURN_END, VERIFIERS, Verification, VerifierPool, died, offered
from nemo_rl.environments.section_parts import Pattern, PatternWithGroup
from nemo_rl.utils.registry import find
from nemo_rl.utils.task_formats import one_text

RewardFunction = Callable[..., float]
Messages = Sequence[Mapping[str, Any]]


def _is_verifier(name: str) -> str:
    if name not in VERIFIERS:
        raise ValueError(f"there is no math_verify_impl {name!r}; {did_you_mean(name, VERIFIERS)}")
    return name


Text = Annotated[str, Field(min_length=1)]
Verifier = Annotated[str, AfterValidator(_is_verifier)]


def prompt_and_episode(messages: Messages) -> tuple[Messages, Messages]:
    """The messages before the first turn that the policy wrote, and the messages from that turn on.

    ValueError if no turn is marked as its own.
    """
    for first, message in enumerate(messages):
        if message.get("sampled"):
            return messages[:first], messages[first:]
    raise ValueError(
        'no message has "sampled": True, the mark of the turns that the policy wrote; episodes set it, and a script '
        "that makes conversations by itself has to"
    )


def response_turns(messages: Messages) -> list[str]:
    """The contents of the turns that the policy wrote in this episode. ValueError as `prompt_and_episode`."""
    return [message["content"] for message in prompt_and_episode(messages)[1] if message.get("sampled")]


def response_text(messages: Messages) -> str:
    """`response_turns` as one text, each turn on lines of its own: two turns never make one number."""
    return "\n".join(response_turns(messages))


def conversation_of(metadata: Any, *, reader: str) -> list[dict[str, str]]:
    """The conversation of the row, `metadata["messages"]`, for a `reader` of texts.

    ValueError without it, and for a row with images, which the reader does not see. A judge may compare with a
    reference instead.
    """
    if not metadata or "messages" not in metadata:
        raise ValueError(
            f"a {reader} reads the conversation of the row, which this dataset's processor does not give; set "
            "processor: conversation_processor for the dataset (or in data.default)"
        )
    if "num_images" in metadata and not (reader == "judge" and "ground_truth" in metadata):
        raise ValueError(
            f"a {reader} reads texts, and the row has {metadata['num_images']} image(s); score such rows by their "
            "expected answer: with reward functions (type: composite), or with a judge"
        )
    return metadata["messages"]


def _expected(metadata: Any, key: str) -> str:
    """An entry of the metadata as text. ValueError when it is not there."""
    if not isinstance(metadata, Mapping) or key not in metadata:
        found = ", ".join(map(str, metadata)) if isinstance(metadata, Mapping) and metadata else "nothing"
        raise ValueError(f"the metadata has no {key!r} (it has {found}); see data.default.processor")
    return one_text(metadata[key], f"as {key}")


def _expected_list(metadata: Any, key: str) -> str:
    """An entry of the metadata that is a list, or its JSON, as JSON. ValueError when it is not there."""
    is_list = isinstance(metadata, Mapping) and isinstance(metadata.get(key), list)
    return json.dumps(metadata[key]) if is_list else _expected(metadata, key)


def whole_format(
    messages: Messages,
    metadata: Any,
    *,
    pattern: Pattern | None = None,
    think_tag: Text = "think",
    answer_tag: Text = "answer",
) -> float:
    """1 if the response, without white space around it, is `pattern` from end to end; `.` matches line ends too.

    Without a pattern: `<think>...</think>` and then `<answer>...</answer>`, each once.
    """
    text = response_text(messages).strip()
    if pattern is not None:
        return float(re.fullmatch(pattern, text, re.DOTALL) is not None)
    marks = [f"<{think_tag}>", f"</{think_tag}>", f"<{answer_tag}>", f"</{answer_tag}>"]
    whole = r"{}.*{}\s*{}.*{}".format(*map(re.escape, marks))
    return float(all(text.count(mark) == 1 for mark in marks) and re.fullmatch(whole, text, re.DOTALL) is not None)


def format_parts(messages: Messages, metadata: Any, *, think_tag: Text = "think", answer_tag: Text = "answer") -> float:
    """0.25 for `<think>...</think>` in the response, and 0.75 for `<answer>...</answer>`: `format` of NeMo RL."""
    text = response_text(messages)
    return sum(
        share for tag, share in ((think_tag, 0.25), (answer_tag, 0.75)) if re.search(_inside(tag), text, re.DOTALL)
    )


def exact_answer(
    messages: Messages,
    metadata: Any,
    *,
    pattern: PatternWithGroup | None = None,
    key: Text = "ground_truth",
    ignore_case: bool = False,
    alphanumeric: bool = False,
) -> float:
    """1 if the answer is `metadata[key]`, apart from white space around both.

    The answer is the first group of the last match of `pattern`, or, without one, the whole response. `alphanumeric`
    compares letters and digits only.
    """

    answer = response_text(messages)
    if pattern is not None:
        found = list(re.finditer(pattern, answer, re.DOTALL))
        if not found:
            return 0.0
        answer = found[-1][1] or ""
    given, expected = (_plain(text, ignore_case, alphanumeric) for text in (answer, _expected(metadata, key)))
    return float(given == expected)


def _plain(text: str, ignore_case: bool = True, alphanumeric: bool = True) -> str:
    text = "".join(filter(str.isalnum, text)) if alphanumeric else text.strip()
    return text.casefold() if ignore_case else text


def exact_answer_alphanumeric(
    messages: Messages, metadata: Any, *, answer_tag: Text = "answer", key: Text = "ground_truth"
) -> float:
    """1 if the last `<answer>...</answer>` has the letters and digits of `metadata[key]`, in any case."""
    pattern = _inside(answer_tag)
    return exact_answer(messages, metadata, pattern=pattern, key=key, ignore_case=True, alphanumeric=True)


def find_answers(response: str, answer_tag: str = "answer") -> list[str]:
    """The texts between `<answer>` and `</answer>`."""
    return re.findall(_inside(answer_tag), response, re.DOTALL)


def as_response(answer: str, verifier: str) -> str:
    """An answer as a response in which the verifier, a name of VERIFIERS, finds it.

    A full stop at the end of an expression is no mathematics.
    """
    if verifier != "hf_math_verify":
        return f"Answer: {answer.strip()}"
    answer = answer.strip().lstrip("$").rstrip("$. ").replace("°", "^\\circ")
    return answer if "\\boxed" in answer else f"\\boxed{{{answer}}}"


def _inside(tag: str) -> str:
    """A pattern whose group is the text between `<tag>` and the next `</tag>`."""
    tag = re.escape(tag)
    return f"<{tag}>((?:(?!<{tag}>).)*?)</{tag}>"


_verifiers = threading.local()  # one process for each thread that verifies


def math_expression(
    messages: Messages,
    metadata: Any,
    *,
    key: Text = "ground_truth",
    answer_tag: Text = "answer",
    math_verify_impl: Verifier = "hf_math_verify",
    verify_timeout_s: Annotated[float, Field(gt=0)] = 5.0,
    published_rules: bool = False,
) -> float:
    """1 if the response gives a mathematical expression equal to `metadata[key]`, as the math environment checks it.

    The content of the last `<answer>...</answer>`, if there is one, is judged as if it were boxed, or stood behind
    "Answer:". A verification that takes longer than `verify_timeout_s` is ended and counts as wrong. RuntimeError when
    there is no verdict.
    """
    _is_verifier(math_verify_impl)
    response = TURN_END.join(response_turns(messages))
    if tagged := find_answers(response, answer_tag):
        response = as_response(tagged[-1], math_verify_impl)
    job = Verification(math_verify_impl, response, _expected(metadata, key), offered(metadata), published_rules)
    pools: dict[float, VerifierPool] = _verifiers.__dict__.setdefault("pools", {})
    if verify_timeout_s not in pools:
        pools[verify_timeout_s] = VerifierPool(1, verify_timeout_s)
    [result] = pools[verify_timeout_s].run([job])
    if result.failure == "died":
        raise RuntimeError(died(job))
    return float(result.correct)


def length_reward(
    messages: Messages, metadata: Any, *, soft_limit: Annotated[float, Field(ge=0)], hard_limit: float
) -> float:
    """1 up to `soft_limit` characters of response, 0 from `hard_limit` on, a straight line between."""
    if not soft_limit < hard_limit:
        raise ValueError(f"length: soft_limit={soft_limit!r} must be below hard_limit={hard_limit!r}")
    size = sum(map(len, response_turns(messages)))
    return min(1.0, max(0.0, (hard_limit - size) / (hard_limit - soft_limit)))


def contains(
    messages: Messages,
    metadata: Any,
    *,
    texts: Annotated[Sequence[Text], Field(min_length=1)],
    ignore_case: bool = True,
) -> float:
    """The fraction of `texts` that occur in the response."""
    response = response_text(messages)
    if ignore_case:
        response, texts = response.casefold(), [text.casefold() for text in texts]
    return sum(text in response for text in texts) / len(texts)


def box_overlap(messages: Messages, metadata: Any, *, key: Text = "ground_truth") -> float:
    """The intersection of two boxes over their union, 0 to 1: the last four numbers in [...] of the response, and those
    of `metadata[key]`; each left, top, right, bottom."""
    return _overlap_and_gap(messages, metadata, key)[0]


def box_giou(
    messages: Messages, metadata: Any, *, giou_penalty_thres: float = 10.0, key: Text = "ground_truth"
) -> float:
    """`box_overlap` less the part of the smallest box around both that neither covers, -1 to 1; -1 without a box.

    From an overlap of `giou_penalty_thres` on, the overlap itself; no overlap is above 1. The generalised intersection
    over union (Rezatofighi et al. 2019, arXiv 1902.09630): of boxes that do not meet, the nearer get more.
    """
    overlap, gap = _overlap_and_gap(messages, metadata, key)
    return overlap - gap if overlap < giou_penalty_thres else overlap


def tagged_box_giou(
    messages: Messages,
    metadata: Any,
    *,
    giou_penalty_thres: float = 10.0,
    answer_tag: Text = "answer",
    key: Text = "ground_truth",
) -> float:
    """`box_giou` of the four numbers in the last `<answer>...</answer>`, with or without brackets; 0 without them.

    `bbox_giou` of NeMo RL.
    """
    answers = find_answers(response_text(messages), answer_tag)
    box = re.findall(_NUMBER, answers[-1]) if answers else []
    if len(box) != 4:
        return 0.0
    given = [{"role": "assistant", "content": f"[{', '.join(box)}]", "sampled": True}]
    return box_giou(given, metadata, giou_penalty_thres=giou_penalty_thres, key=key)


_NUMBER = r"-?\d+(?:\.\d+)?"


def _overlap_and_gap(messages: Messages, metadata: Any, key: str) -> tuple[float, float]:
    pattern = rf"\[{','.join([rf'\s*({_NUMBER})\s*'] * 4)}\]"
    right = _expected_list(metadata, key)
    found, expected = (re.findall(pattern, text) for text in (response_text(messages), right))
    if not expected:
        raise ValueError(f"metadata[{key!r}] is no box [left, top, right, bottom]: {right[:80]!r}")
    if not found:
        return 0.0, 1.0
    a, b = ([float(text) for text in box] for box in (found[-1], expected[-1]))
    sides = [max(0.0, min(a[i + 2], b[i + 2]) - max(a[i], b[i])) for i in (0, 1)]
    areas = [max(0.0, box[2] - box[0]) * max(0.0, box[3] - box[1]) for box in (a, b)]
    shared = sides[0] * sides[1]
    union = sum(areas) - shared
    around = math.prod(max(a[i::2] + b[i::2]) - min(a[i::2] + b[i::2]) for i in (0, 1))
    return (shared / union if shared else 0.0), (1 - union / around if 0 < around < math.inf else 1.0)


def vqa_agreement(
    messages: Messages, metadata: Any, *, answer_tag: Text = "answer", key: Text = "ground_truth"
) -> float:
    """The agreement with people: a third for each of `metadata[key]`, a JSON list, that is the answer; at most 1.

    The answer is the last `<answer>...</answer>`, or the whole response; letters and digits count, in any case (Antol
    et al. 2015, arXiv 1505.00468, without its average over nine of ten people).
    """
    response = response_text(messages)
    answer = _plain((find_answers(response, answer_tag) or [response])[-1])
    return min(1.0, sum(_plain(other) == answer for other in json.loads(_expected_list(metadata, key))) / 3)


REWARD_FUNCTIONS: dict[str, RewardFunction] = {
    "format": whole_format,
    "format_parts": format_parts,
    "exact_answer": exact_answer,
    "exact_answer_alphanumeric": exact_answer_alphanumeric,
    "math_expression": math_expression,
    "length": length_reward,
    "contains": contains,
    "box_overlap": box_overlap,
    "box_giou": box_giou,
    "vqa_agreement": vqa_agreement,
    # Names of NeMo RL.
    "exact_alnum": exact_answer_alphanumeric,
    "math_expr": math_expression,
    "bbox_giou": tagged_box_giou,
}


class RewardPart(Protocol):
    """A part of a composite; a `RewardFunctionConfig` is one."""

    @property
    def function(self) -> str: ...
    @property
    def kwargs(self) -> dict[str, Any]: ...


def find_reward_function(name: str) -> RewardFunction:
    """The function of a registry name or an import path (`package.module:function`). ValueError without one."""
    return find(REWARD_FUNCTIONS, name, "reward function")


def check_arguments(name: str, function: RewardFunction, kwargs: Mapping[str, Any]) -> None:
    """ValueError when the function cannot be called with these `kwargs`; the values of our own functions count too."""
    try:
        inspect.signature(function).bind([], {}, **kwargs)
    except TypeError as error:
        raise ValueError(f"reward function {name!r} cannot be called with kwargs {dict(kwargs)}: {error}") from error
    if REWARD_FUNCTIONS.get(name) is not function:
        return
    annotations = get_type_hints(function, include_extras=True)
    for key, value in kwargs.items():
        try:
            TypeAdapter(annotations[key], config=ConfigDict(strict=True)).validate_python(value)
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]["msg"]
            raise ValueError(f"{name}: {key}: {problem} (got {value!r})") from error
    if function is length_reward:
        length_reward([{"role": "assistant", "content": "", "sampled": True}], {}, **kwargs)  # its limits


def load_reward(part: RewardPart) -> RewardFunction:
    """The function of a part of a composite. ValueError if it does not exist or cannot be called with `part.kwargs`."""
    function = find_reward_function(part.function)
    check_arguments(part.function, function, part.kwargs)
    return function
