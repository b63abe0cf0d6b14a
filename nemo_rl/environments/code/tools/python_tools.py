"""Mathematics with tools: the model calls them, sees what they say, and ends the episode with its answer."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NotRequired, TypedDict

import torch

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.environments.code.environment import shorten
from nemo_rl.environments.code.sandbox.sandbox import SandboxPool
from nemo_rl.environments.code.tools.tools import State, Tool, ToolError, calculator, import_tool, python
from nemo_rl.environments.config import MathEnvironmentConfig, PythonToolsEnvironmentConfig
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn
from nemo_rl.environments.math.environment import MathEnvironment, MathMetadata
from nemo_rl.types import LLMMessageLogType

# -- Calls of tools in what a model says. Pure functions on text.

CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
FENCED = re.compile(r"```tool_code[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)

TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}


@dataclass(frozen=True)
class ToolCall:
    """One call; `problem` says to the model what is wrong with it, and is empty where it can be made."""

    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    problem: str = ""


def find_calls(text: str) -> list[ToolCall]:
    """The calls of a turn in order: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

    Without any, fenced blocks marked `tool_code` are calls of `python`. The last mark may be missing: a stop string
    ends the turn before it.
    """
    if calls := CALL.findall(text):
        return [_parse(call.strip()) for call in calls]
    return [ToolCall("python", {"code": block}) for block in FENCED.findall(text)]


def _parse(text: str) -> ToolCall:
    form = 'write {"name": "<tool>", "arguments": {...}} between <tool_call> and </tool_call>'
    try:
        call = json.loads(text)
        # Some models write the arguments as JSON in a string, as OpenAI's interface does.
        if isinstance(call, dict) and isinstance(call.get("arguments"), str):
            call["arguments"] = json.loads(call["arguments"])
    except (ValueError, RecursionError) as error:
        return ToolCall(problem=f"this call is not JSON ({error}): {form}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return ToolCall(problem=f"this call names no tool: {form}")
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return ToolCall(call["name"], problem=f"the arguments are no JSON object: {form}")
    return ToolCall(call["name"], arguments)


def problem_of(call: ToolCall, specs: Mapping[str, Mapping[str, Any]]) -> str:
    """What is wrong with a call, by the specifications of the tools in OpenAI's format; empty: nothing."""
    if call.problem:
        return call.problem
    if call.name not in specs:
        return f"there is no tool {call.name!r}; there are: {', '.join(specs)}"
    parameters = specs[call.name]["function"]["parameters"]
    properties: Mapping[str, Any] = parameters.get("properties", {})
    for name in parameters.get("required", ()):
        if name not in call.arguments:
            return f"{call.name} needs the argument {name!r}"
    for name, value in call.arguments.items():
        if name not in properties:
            return f"{call.name} has no argument {name!r}; it has: {', '.join(properties)}"
        kind = properties[name].get("type")
        if kind in TYPES and (not isinstance(value, TYPES[kind]) or (isinstance(value, bool) and kind != "boolean")):
            return f"argument {name!r} of {call.name} must be of type {kind}"
    return ""


class PythonToolsMetadata(TypedDict):
    """The expected answer, and what the tools of the episode remember."""

    ground_truth: str
    tool_state: NotRequired[State]


class PythonToolEnvironment(EnvironmentInterface[PythonToolsMetadata]):
    """A turn with calls gets their results as a message of role `tool`; the first turn without one is the answer.

    What is wrong with a call is told to the model. The answer is checked against `metadata["ground_truth"]`: reward 1
    or 0.

    Raises:
        SandboxUnavailable: where `python` is among the tools and this machine cannot isolate programs.
        ValueError: for a tool that cannot be imported.
    """

    def __init__(self, cfg: PythonToolsEnvironmentConfig | Mapping[str, Any]) -> None:
        self.cfg = cfg if isinstance(cfg, PythonToolsEnvironmentConfig) else PythonToolsEnvironmentConfig(**cfg)
        self.sandbox = self._sandbox() if "python" in self.cfg.tools else None
        tools = [self._tool(name) for name in self.cfg.tools]
        self.tools = {tool.name: tool for tool in tools}
        self.specs = {tool.name: tool.spec for tool in tools}
        self.verifier = MathEnvironment(
            MathEnvironmentConfig(
                num_workers=self.cfg.num_workers,
                math_verify_impl=self.cfg.math_verify_impl,
                verify_timeout_s=self.cfg.verify_timeout_s,
            )
        )
        self.threads = ThreadPoolExecutor(max_workers=self.cfg.num_workers, thread_name_prefix="tools")
        self.num_calls = self.num_refused = 0

    def _sandbox(self) -> SandboxPool:
        sandbox = self.cfg.sandbox
        return SandboxPool(
            self.cfg.num_workers,
            sandbox.limits,
            preload=sandbox.preload,
            site_packages=sandbox.site_packages,
            allow_weaker=sandbox.allow_weaker,
        )

    def _tool(self, name: str) -> Tool:
        if name == "calculator":
            return calculator()
        if name == "python":
            assert self.sandbox is not None
            return python(
                self.sandbox,
                self.cfg.sandbox.limits,
                keep_state=self.cfg.keep_state,
                max_characters=self.cfg.max_result_characters,
            )
        return import_tool(name)

    def step(
        self, message_log_batch: list[LLMMessageLogType], metadata: list[PythonToolsMetadata]
    ) -> EnvironmentReturn[PythonToolsMetadata]:
        """Answer the calls of each conversation, or check its answer."""
        calls = [find_calls(str(log[-1]["content"])) for log in message_log_batch]
        states = [dict(known.get("tool_state", {})) for known in metadata]
        observations = [
            {"role": "tool", "content": content} for content in self.threads.map(self._answer, calls, states)
        ]
        rewards = [0.0] * len(calls)
        answers: list[str | None] = [None] * len(calls)
        failures: list[str | None] = [None] * len(calls)
        ends = [i for i, of_turn in enumerate(calls) if not of_turn]
        checked = self._check([message_log_batch[i][-1:] for i in ends], [metadata[i] for i in ends])
        for i, (observation, reward, answer, failure) in zip(ends, checked, strict=True):
            observations[i], rewards[i], answers[i], failures[i] = observation, reward, answer, failure
        return EnvironmentReturn(
            observations=observations,
            metadata=[{**known, "tool_state": state} for known, state in zip(metadata, states, strict=True)],
            next_stop_strings=[None] * len(calls),
            rewards=torch.tensor(rewards),
            terminateds=torch.tensor([not of_turn for of_turn in calls]),
            answers=answers,
            failures=failures,
        )

    def _check(
        self, logs: list[LLMMessageLogType], metadata: list[PythonToolsMetadata]
    ) -> list[tuple[dict[str, str], float, str | None, str | None]]:
        """(observation, reward, extracted answer, failure) of turns that answer."""
        if not logs:
            return []
        result = self.verifier.step(logs, [MathMetadata(ground_truth=known["ground_truth"]) for known in metadata])
        assert result.answers is not None and result.failures is not None
        return list(zip(result.observations, result.rewards.tolist(), result.answers, result.failures, strict=True))

    def _answer(self, calls: list[ToolCall], state: State) -> str:
        """What the tools say to the calls of one turn; they change `state`."""
        said = [self._call(call, state) for call in calls[: self.cfg.max_calls_per_turn]]
        if len(calls) > len(said):
            said.append(f"error: only the first {len(said)} calls of a turn are answered")
        return said[0] if len(said) == 1 else "\n".join(f"[{i}] {text}" for i, text in enumerate(said, start=1))

    def _call(self, call: ToolCall, state: State) -> str:
        self.num_calls += 1
        problem = problem_of(call, self.specs)
        if not problem:
            try:
                return shorten(self.tools[call.name].run(call.arguments, state), self.cfg.max_result_characters)
            except ToolError as error:
                problem = str(error)
        self.num_refused += 1
        return shorten(f"error: {problem}", self.cfg.max_result_characters)

    def global_post_process_and_metrics(
        self, batch: BatchedDataDict[Any]
    ) -> tuple[BatchedDataDict[Any], dict[str, float]]:
        """Metrics of a batch with `rewards` [B] and `is_end` [B] (not cut off), and of all calls since the last."""
        metrics = {
            "accuracy": (batch["rewards"] >= 1).float().mean().item(),
            "fraction_of_samples_properly_ended": batch["is_end"].float().mean().item(),
            "tool_calls": float(self.num_calls),
            "refused_tool_call_rate": self.num_refused / max(1, self.num_calls),
            "num_verifications_timed_out": float(self.verifier.num_timed_out),
        }
        self.num_calls = self.num_refused = self.verifier.num_timed_out = 0
        return batch, metrics

    def shutdown(self) -> None:
        """End the processes of sandbox and verifiers."""
        self.threads.shutdown(wait=True)
        self.verifier.shutdown()
        if self.sandbox is not None:
            self.sandbox.close()
