"""An agent that is a command: both of its roles answer the same sum, and who is right alone wins. No package.

It ends with status 1 if it can write beside its folder or read another process's environment.
"""

import json
import os
import sys
import urllib.request
from pathlib import Path
from typing import Any


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def main() -> None:
    for path, mode in (
        (Path.cwd().parent / "left_by_an_agent", "w"),
        (Path("/proc", str(os.getppid()), "environ"), "r"),
    ):
        try:
            path.open(mode).close()
        except PermissionError:
            continue
        sys.exit(f"it could open {path}")
    task = json.loads(Path(os.environ["AGENT_TASK"]).read_text())
    right = {}
    for role, url in task["roles"].items():
        request = {"model": os.environ["OPENAI_MODEL"], "messages": task["messages"]}
        said = post(f"{url}/chat/completions", request)["choices"][0]["message"]["content"]
        right[role] = f"\\boxed{{{task['row']['expected_answer']}}}" in said
    for role in right:
        reward = 0.5 + 0.5 * (right[role] - any(is_right for other, is_right in right.items() if other != role))
        post(os.environ["AGENT_REWARD_URL"], {"reward": reward, "role": role})


if __name__ == "__main__":
    main()
