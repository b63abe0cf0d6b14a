"""Messages of conversations."""

from typing import Any


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def sampled(content: str) -> dict[str, Any]:
    """A turn that the policy wrote in this episode."""
    return assistant(content, sampled=True)


def answered(answer: str, asked: str = "1+1") -> list[dict[str, Any]]:
    """One turn, as environments see it."""
    return [user(asked), sampled(answer)]
