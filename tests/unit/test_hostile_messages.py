"""Data, requests, answers of servers and files of checkpoints that somebody else wrote: refused by a message.

`HOSTILE_CASES=10000 pytest tests/unit/test_hostile_messages.py` looks longer.
"""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from aiohttp import web
from hypothesis import example, given
from hypothesis import strategies as st

from nemo_rl.data.datasets.examples import chat_row, columns_row, keyed_row
from nemo_rl.data.datasets.files import JsonLines, MarkedRows
from nemo_rl.data.interfaces import BAD_ROW, TaskDataSpec
from nemo_rl.data.rows.processors import find_processor
from nemo_rl.data.rows.setup import PromptProcessor, Task
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn, one_turn
from nemo_rl.environments.remote import EnvironmentServer, RemoteEnvironment
from nemo_rl.rollouts.openai_server import OpenAIServer
from nemo_rl.utils.checkpoint.manager import CheckpointError
from nemo_rl.utils.checkpoint.tensors import METADATA_NAME, saved_tensors
from nemo_rl.utils.tables import MAX_ROW_BYTES, load_table
from tests.tables import named
from tests.unit.data.test_examples import TOKENIZER, maker, prompt
from tests.unit.environments.http_servers import answering, post, served
from tests.unit.environments.test_remote import GOOD
from tests.unit.rollouts.test_openai_server import TEMPLATE, Engine, settings
from tests.unit.rollouts.test_openai_server import TOKENIZER as SERVED_TOKENIZER
from tests.unit.test_hostile_input import CASES, SCALARS, VALUES, hostile, with_other_bytes

pytestmark = pytest.mark.timeout(300 + CASES // 5)
DEEP = 100_000
HUGE = ["1e999", "-1e999", "NaN", "9" * 5000, "0." + "1" * 5000, "[" * DEEP, '{"a":' * DEEP, '"\\ud800"', '"\x00"']


@st.composite
def damaged(draw: st.DrawFn, text: str) -> bytes:
    """A JSON text with a value replaced, cut off, or with other bytes."""
    for _ in range(draw(st.integers(1, 3))):
        begin = draw(st.integers(0, max(0, len(text) - 1)))
        end = draw(st.integers(begin, min(len(text), begin + 12)))
        new = draw(st.sampled_from([*HUGE, "", '"', "{", "}", "[", "]", ":", ",", "null", "-1", "0", "1.5", "true"]))
        text = text[:begin] + new + text[end:]
    content = text.encode("utf-8", "surrogatepass")
    if draw(st.booleans()):
        content = content[: draw(st.integers(0, len(content)))]
    return with_other_bytes(draw, content, most=1)


# -- data

CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "tools": None}
ROLES = st.sampled_from(["user", "assistant", "system", "tool", ""])
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": ROLES | VALUES, "content": VALUES}, optional={"tool_calls": VALUES, "name": VALUES})
    | VALUES,
    max_size=3,
)
OF_VALUES = ("input", "output", "tools", "prompt", "problem", "expected_answer", "options", "answer")
ROWS = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(OF_VALUES, VALUES),
        **dict.fromkeys(("messages", "chosen", "rejected"), MESSAGES | VALUES),
        **dict.fromkeys(("input_ids", "token_mask"), st.lists(st.integers() | SCALARS, max_size=4)),
    },
)
PAIR = {f"{key}_key": key for key in ("prompt", "chosen", "rejected")}
LAYOUTS: list[Any] = [
    *(chat_row, dict, partial(columns_row, input_key="input", output_key="output")),
    partial(keyed_row, **PAIR, tool_key="tools"),
]


@hostile
@given(damaged(json.dumps(CHAT)))
def test_lines_of_data_are_rows_or_marked(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(json.dumps(CHAT).encode() + b"\n" + line)
    for row in MarkedRows(JsonLines(str(path)), chat_row):
        assert BAD_ROW in row or isinstance(row["messages"], list)


@hostile
@given(ROWS, st.sampled_from(LAYOUTS), st.sampled_from(["math_hf_data", "multichoice_qa", "conversation"]))
def test_no_content_of_a_row_raises(row: dict[str, Any], layout: Any, name: str) -> None:
    """Its examples have tokens, or a problem that is told; its prompt has tokens, or is refused."""
    for processor in ("sft_processor", "preference_processor"):
        examples, meta = maker(processor)(prompt(MarkedRows([row], layout)[0]))
        assert meta.problem or all(len(example.token_ids) > 0 for example in examples)
    name += "_processor"
    task = Task(spec=TaskDataSpec("t"), processor=find_processor(name), processor_name=name)
    try:
        datum = PromptProcessor({"t": task}, TOKENIZER, 256)(prompt(row))
    except ValueError as error:
        assert str(error)
    else:
        assert datum["length"] > 0


NO_DATA = {
    "bytes.csv": b"input,output\na,\xff\xfe\n",
    "open.csv": b'input,output\n"a,b\n',
    "list.json": b"[1, 2",
    "cut.parquet": b"PAR1" + bytes(60),
    "nothing.json": b"[]",
    "blank.jsonl": b"\n\n",
    "deep.jsonl": b'{"a":' * DEEP,
}


@pytest.mark.parametrize("name", NO_DATA)
def test_files_that_are_no_data_are_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(NO_DATA[name])
    with pytest.raises(ValueError, match="dataset"):
        load_table(str(tmp_path / name), cache_dir=str(tmp_path / "cache"))


def test_a_row_of_bytes_that_are_no_text_is_marked(tmp_path: Path) -> None:
    """Types may differ from row to row."""
    of_types = b'{"input": "a"}\n{"input": {"b": [1]}}\n{"input": [[2]]}\n'
    for content, marked in ((b'{"input": "a", "output": "\xff\xfe"}\n', [True]), (of_types, [False] * 3)):
        (tmp_path / f"{len(marked)}.jsonl").write_bytes(content)
        rows = MarkedRows(load_table(str(tmp_path / f"{len(marked)}.jsonl"), cache_dir=str(tmp_path / "cache")), dict)
        assert [BAD_ROW in row for row in rows] == marked


def test_a_row_above_the_limit_is_refused_without_reading_it(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with path.open("wb") as file:
        file.write(b'{"messages": []}\n{"messages": "')
        file.truncate(MAX_ROW_BYTES + (1 << 20))
    started = time.process_time()
    rows = MarkedRows(JsonLines(str(path)), dict)
    assert rows[0] == {"messages": []}
    assert f"more than {MAX_ROW_BYTES >> 20} MiB" in rows[1][BAD_ROW]
    with pytest.raises(ValueError, match=r"row 1 .*MiB"):
        load_table(str(path), cache_dir=str(tmp_path / "cache"))
    assert time.process_time() - started < 8


# -- requests and answers over HTTP


class Echo(EnvironmentInterface[Any]):
    def step(self, message_log_batch: list[Any], metadata: list[Any]) -> EnvironmentReturn[Any]:
        return one_turn([log[-1]["content"] for log in message_log_batch], metadata, torch.ones(len(metadata)))

    def global_post_process_and_metrics(self, batch: Any) -> Any:
        return batch, {"size": float(len(batch))}


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with served(EnvironmentServer(Echo(), "echo", "secret").app()) as url:
        yield url


STEP = {"protocol": 1, "request_id": "a", "batch": [{"messages": [{"role": "user", "content": "b"}], "metadata": {}}]}
METRICS = {"protocol": 1, "request_id": "b", "batch": {"rewards": [1.0, 2], "group_id": ["x", "y"]}}


@hostile
@given(
    st.tuples(st.just("/step"), damaged(json.dumps(STEP)))
    | st.tuples(st.just("/metrics"), damaged(json.dumps(METRICS)))
)
def test_an_environment_server_answers_whatever_is_sent(server: str, sent: tuple[str, bytes]) -> None:
    status, answer = post(server, *sent, {"Authorization": "Bearer secret"})
    assert status in (200, 400) and ("error" in answer) == (status == 400), (status, answer)


@named(
    "token",
    {
        "none": "",
        "without Bearer": "secret",
        "without a token": "Bearer",
        "another token": "Bearer secret2",
        "beyond ASCII": "Bearer \xe9",
        "Basic": "Basic secret",
    },
)
def test_no_other_header_is_taken_for_the_token(token: str, server: str) -> None:
    assert post(server, "/step", json.dumps(STEP).encode(), {"Authorization": token})[0] == 401


MORE = {"metadata": [{"a": [1, 2.5]}], "next_stop_strings": [["x"]], "answers": ["1"], "metrics": [{"b": 1.0}]}


@pytest.fixture(scope="module")
def liar() -> Iterator[tuple[RemoteEnvironment, list[bytes]]]:
    """An environment behind a server that answers with the bytes of the list."""
    said = [b""]

    async def step(request: web.Request) -> web.Response:
        return web.Response(body=said[0], content_type="application/json")

    with answering(step, backoff_s=0.0, max_retries=0) as environment:
        yield environment, said


@hostile
@given(damaged(json.dumps(GOOD | MORE)))
def test_what_an_environment_server_says_is_a_step_or_a_failure(
    liar: tuple[RemoteEnvironment, list[bytes]], answer: bytes
) -> None:
    environment, said = liar
    said[0] = answer
    found = environment.step([[{"role": "assistant", "content": "b"}]], [{}])
    assert found.failures is not None
    assert found.failures[0] is not None or torch.isfinite(found.rewards).all()


CHAT_REQUEST = {
    **{"model": "m", "max_tokens": 5, "temperature": 0.5, "top_p": 1, "stop": ["x"], "seed": 3, "n": 2},
    "messages": [{"role": "user", "content": "a"}],
    "tools": [{"type": "function", "function": {"name": "f"}}],
}
RESPONSES_REQUEST = {
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "1"}]},
        {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "3"},
    ],
    "tools": [{"type": "function", "name": "add", "parameters": {}}],
}


@pytest.fixture(scope="module")
def openai_url() -> Iterator[str]:
    """The server of the run, before an engine that says "3"."""
    SERVED_TOKENIZER.chat_template = TEMPLATE
    server = OpenAIServer(settings(), [])
    server.answers.generate = Engine()
    with served(server.app) as url:
        yield url


def asked(sound: dict[str, Any]) -> st.SearchStrategy[bytes]:
    """A request that is damaged, or has other values."""
    others = st.dictionaries(st.sampled_from(sorted(sound)), MESSAGES | VALUES, max_size=2)
    return damaged(json.dumps(sound)) | others.map(lambda new: json.dumps({**sound, **new}).encode())


@hostile
@given(
    st.one_of(
        st.tuples(st.sampled_from(["chat/completions", "completions"]), asked(CHAT_REQUEST)),
        st.tuples(st.just("completions"), asked({"prompt": [5, 6], "max_tokens": 3, "logprobs": 0, "echo": False})),
        st.tuples(st.just("responses"), asked(RESPONSES_REQUEST)),
    )
)
@example(("chat/completions", b"{"))
@example(("chat/completions", b"[]"))
@example(("chat/completions", b"\xff"))
@example(("chat/completions", b"[" * 100_000))
def test_the_openai_server_answers_whatever_is_asked(openai_url: str, sent: tuple[str, bytes]) -> None:
    path, body = sent
    status, answer = post(openai_url, f"/v1/{path}", body, {"Authorization": "Bearer secret"})
    error = answer.get("error")
    assert status in (200, 400, 404) and (error is None) == (status == 200), (status, answer)
    assert error is None or 0 < len(error["message"]) < 5000


# -- checkpoints

CALLED: list[str] = []


def trap(text: str) -> None:
    CALLED.append(text)


@dataclass
class Malicious:
    call: Any

    def __reduce__(self) -> Any:
        return self.call


CALL = st.sampled_from(
    [(trap, ("x",)), (eval, ("__import__('os')",)), (getattr, (int, "real")), (exec, ("1",)), (open, ("/dev/null",))]
).map(Malicious)
NESTED = CALL | st.lists(CALL, min_size=1, max_size=2) | CALL.map(lambda call: {"state_dict_metadata": {"a": call}})


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """The folder of a checkpoint and its sound header, which tests damage."""
    folder = tmp_path_factory.mktemp("saved")
    dcp.save({"a": torch.ones(2, 3), "b": torch.zeros(4)}, checkpoint_id=str(folder), no_dist=True)
    return folder, (folder / METADATA_NAME).read_bytes()


@hostile
@given(NESTED, st.integers(0, 5), st.data())
def test_headers_of_tensors_that_are_damaged_or_malicious_are_refused_and_never_unpickled(
    saved: tuple[Path, bytes], nested: Any, protocol: int, data: st.DataObject
) -> None:
    """A pickle as a header of torch's format, whole or in the middle of a sound one, and in the state of the data."""
    folder, sound = saved
    content, damaged = pickle.dumps(nested, protocol), with_other_bytes(data.draw, sound, most=3)
    at = data.draw(st.integers(2, len(sound) - 1))
    others = (damaged, damaged[:at], sound[:at] + content, sound[:at] + content[2:] + sound[at:])
    for header in (content, *others):
        (folder / METADATA_NAME).write_bytes(header)
        try:
            saved_tensors(folder)
        except CheckpointError as error:
            assert str(folder) in str(error)
        assert not CALLED
    (folder / "state.pt").write_bytes(content)
    with pytest.raises(pickle.UnpicklingError):
        torch.load(folder / "state.pt", weights_only=True)
    assert not CALLED
