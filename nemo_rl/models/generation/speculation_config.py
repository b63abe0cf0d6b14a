"""What of vLLM's speculative decoding may be asked for in `vllm_kwargs.speculative_config`. Free of vLLM."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

KEY = "speculative_config"
METHODS = ("ngram", "draft_model")


def speculation_problems(vllm_kwargs: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(key relative to `vllm_kwargs`, what would work) for settings under which samples would not be what they seem.

    What is left follows the distribution without drafts, reports its logprobs, and depends on a request's seed alone.
    """
    if KEY not in vllm_kwargs:
        return
    settings = vllm_kwargs[KEY]
    if not isinstance(settings, Mapping):
        yield KEY, "must be a section, such as {method: ngram, num_speculative_tokens: 4, prompt_lookup_max: 4}"
        return
    method = settings.get("method")
    if method not in METHODS:
        yield f"{KEY}.method", f"not supported yet: {method}; set {' or '.join(METHODS)}"
    number = settings.get("num_speculative_tokens")
    if type(number) is not int or number < 1:
        yield f"{KEY}.num_speculative_tokens", f"must be the number of tokens of a draft, 1 or more (got {number!r})"
    if method == "draft_model" and not isinstance(settings.get("model"), str):
        yield f"{KEY}.model", "a draft model needs the name or folder of its weights, with the policy's vocabulary"
    if settings.get("rejection_sample_method", "standard") != "standard":
        yield f"{KEY}.rejection_sample_method", "must be standard, which keeps the distribution; remove the key"
    if settings.get("draft_sample_method", "greedy") != "greedy":
        yield f"{KEY}.draft_sample_method", "must be greedy: drawn drafts follow no request's seed; remove the key"
    if "draft_load_config" in settings:
        yield f"{KEY}.draft_load_config", "the library decides it: a draft model is read from disk; remove the key"


def engine_settings(vllm_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """`vllm_kwargs` as the engine is to get them: a draft model has its own weights, the target's come later."""
    settings = dict(vllm_kwargs)
    if KEY in settings and settings[KEY]["method"] == "draft_model":
        settings[KEY] = {**settings[KEY], "draft_load_config": {"load_format": "auto"}}
    return settings
