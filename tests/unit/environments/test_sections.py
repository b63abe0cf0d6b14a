"""Sections of environments that contradict themselves: each mistake is named when the section is read."""

from typing import Any

import pytest
import yaml

from nemo_rl.environments.agents.config import AgentEnvironmentConfig
from nemo_rl.environments.config import OURS, check_sections
from tests.tables import lines, pattern

# `part` is one part of a composite.
WRONG = """
llm_judge: {} -> either a server
llm_judge: {base_url: http://x, model: m, model_name: n} -> either a server
llm_judge: {base_url: http://x} -> name the model
llm_judge: {model_name: n, api_key_env: K} -> belongs to a server
llm_judge: {model_name: n, min_score: 10.0} -> not below max_score=10
llm_judge: {model_name: n, num_votes: 3} -> greedy
llm_judge: {model_name: n, prompt_file: nowhere.txt} -> there is no file
agent: {run: 'm:f', command: [x]} -> one of run, command and url, not run and command
agent: {command: [x], kwargs: {a: 1}} -> kwargs: are arguments of run
agent: {run: 'm:f', raw_text: true} -> raw_text: no effect: sessions of agents render messages themselves
mcp: {servers: {a: {command: x}}, environment: {type: retrieval, dataset_name: c.csv, raw_text: true}}
    -> environment.raw_text: has no effect here; set it in the section of type mcp itself
agent: {command: [x], isolate: false, network: false} -> set isolate=true
agent: {run: 'm:f', network: false} -> network: is kept only from commands
agent: {run: 'm:f', roles: {a b: null}} -> 'a b' is no name of a role
agent: {run: 'm:f', roles: {a: null}, credit: discounted, discount: 0.5} -> set credit=shared, or credit=branch
python_tools: {tools: [calc]} -> there is no tool 'calc'
part: {name: formt} -> did you mean format
part: {name: format, kwargs: {patern: x}} -> unexpected keyword argument 'patern'
part: {name: format, kwargs: {pattern: (a}} -> is no regular expression
part: {name: exact_answer, kwargs: {pattern: 'Answer: .*'}} -> has no group; ... e.g. Answer: (.*)
part: {name: exact_answer, kwargs: {ignore_case: yes please}} -> ignore_case: Input should be a valid boolean
part: {name: math_expression, kwargs: {math_verify_impl: hf_math}} -> did you mean hf_math_verify
part: {name: math_expression, kwargs: {verify_timeout_s: 0}} -> verify_timeout_s: ... than 0 (got 0)
part: {name: length, kwargs: {soft_limit: 20, hard_limit: 10}} -> below hard_limit=10
part: {name: contains, kwargs: {texts: [1]}} -> texts: Input should be a valid string
part: {name: length} -> missing a required keyword-only argument: 'soft_limit'
part: {name: x, env: math, reward: format} -> a function or an environment
part: {name: x, env: math, kwargs: {a: 1}} -> kwargs are for functions
part: {name: format, weight: 0.0} -> every weight is 0
composite: {reward_functions: [{name: a, env: math}, {name: a, env: math}]} -> 2 parts are named 'a'
composite: {reward_functions: [{name: a, env: math, weight: -1}], normalize_weights: true} -> sum is above 0
composite: {reward_functions: [{name: a, env: math}], several_rewards: true} -> there is one part
"""


@pytest.mark.parametrize(("section", "message"), lines(WRONG))
def test_a_section_that_contradicts_itself_is_refused(section: str, message: str):
    [(kind, keys)] = yaml.safe_load(section).items()
    if kind == "part":
        kind, keys = "composite", {"reward_functions": [keys]}
    with pytest.raises(ValueError, match=pattern(message)):
        OURS[kind](**keys)


def test_a_part_of_a_composite_has_no_messages_of_its_own():
    parts: Any = {"reward_functions": [{"name": "a", "env": "part"}]}
    part = OURS["retrieval"](dataset_name="c.csv", raw_text=True)
    env: Any = {"both": OURS["composite"](**parts), "part": part}
    [(key, message)] = check_sections(env, 1e9)
    assert key == "env.both.reward_functions.0.env" and "set env.both.raw_text" in message


def test_two_sections_cannot_listen_on_one_port():
    env: Any = {name: AgentEnvironmentConfig.model_validate({"run": "m:f", "session": {"port": 80}}) for name in "ab"}
    assert [key for key, _ in check_sections(env, 1e9)] == ["env.b.session.port"]
