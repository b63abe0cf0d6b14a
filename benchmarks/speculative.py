"""Tokens per second of one vLLM engine with and without n-gram drafts, same requests, in one run.

Two kinds of text: greedy continuations of an untrained model, which repeat themselves, and answers of the tiny
arithmetic model, which repeat nothing. Prints acceptance, tokens per second and their ratio.

    uv run --extra cpu benchmarks/speculative.py
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from nemo_rl.config.loader import build_section
from nemo_rl.models.generation.config import LoneGenerationConfig
from nemo_rl.models.generation.vllm.config import ENGINE_ENVIRONMENT
from nemo_rl.types import GenerationRequest, SamplingParams

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 2}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=16, help="under way at a time")
    parser.add_argument("--tokens", type=int, default=192, help="of each completion of the untrained model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--width", type=int, default=512, help="of the untrained model, which has 4 layers")
    parser.add_argument("--one", choices=["plain", "ngram"], help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--temperature", type=float, default=0.0, help=argparse.SUPPRESS)
    return parser.parse_args()


def make_model(folder: Path, width: int) -> str:
    """A random Qwen2 with the tiny model's tokenizer."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from nemo_rl.data.tiny_model import build_tiny_tokenizer

    tokenizer = build_tiny_tokenizer()
    eos, pad = (tokenizer.convert_tokens_to_ids([token])[0] for token in ("<eos>", "<pad>"))
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.06,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=pad,
        dtype="float32",
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second of every round, and statistics of the drafts."""
    from transformers import AutoTokenizer

    from nemo_rl.models.generation.vllm.worker import EngineSettings, VllmWorker

    rng = random.Random(0)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    questions = [f"{rng.randrange(10)}+{rng.randrange(10)}" for _ in range(args.requests)]
    prompts: list[list[int]] = [
        tokenizer.apply_chat_template([{"role": "user", "content": q}], add_generation_prompt=True, return_dict=False)
        for q in questions
    ]
    values = {
        "max_new_tokens": args.tokens,
        "vllm_cfg": {"precision": "float32", "max_model_len": args.tokens + 32},
        "vllm_kwargs": {"speculative_config": NGRAM} if args.one == "ngram" else {},
    }
    config = build_section("generation", LoneGenerationConfig, values)
    worker = VllmWorker(
        EngineSettings(model=args.model, tokenizer=args.model, cfg=config, device="cpu", seed=0, load_format="auto")
    )
    sampling = SamplingParams(max_new_tokens=args.tokens, temperature=args.temperature)
    speeds = []
    for number in range(args.rounds + 1):
        started = time.perf_counter()
        requests = (
            GenerationRequest(prompt_token_ids=prompt, sampling=sampling, seed=seed)
            for seed, prompt in enumerate(prompts)
        )
        done = await asyncio.gather(*map(worker.generate, requests))
        if number > 0:  # the first one warms up
            speeds.append(sum(len(one.token_ids) for one in done) / (time.perf_counter() - started))
    counts = await worker.draft_counts()
    worker.shutdown()
    return {
        "tokens_per_s": statistics.median(speeds),
        "rate": counts.num_accepted_tokens / max(1, counts.num_draft_tokens),
        "length": 1 + counts.num_accepted_tokens / max(1, counts.num_drafts),
        "token_ids": [one.token_ids for one in done],
    }


def in_process(args: argparse.Namespace, one: str, model: str, temperature: float) -> dict[str, Any]:
    """Each measurement has its own engine, so that none affects the next."""
    command = [sys.executable, __file__, "--one", one, "--model", model, "--temperature", str(temperature)]
    command += ["--requests", str(args.requests), "--tokens", str(args.tokens), "--rounds", str(args.rounds)]
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # as in a worker group
    environment = {**os.environ, **ENGINE_ENVIRONMENT, **alone, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout
    return json.loads(out.splitlines()[-1])


def main() -> None:
    args = parse()
    if args.one is not None:
        print(json.dumps(asyncio.run(measure(args))))
        return
    from nemo_rl.data.model_folder import resolve_model

    with tempfile.TemporaryDirectory() as folder:
        random_model = make_model(Path(folder), args.width)
        kinds = [("repeating text, greedy", random_model, 0.0), ("arithmetic", resolve_model("tiny:arithmetic"), 1.0)]
        for name, model, temperature in kinds:
            plain, ngram = (in_process(args, one, model, temperature) for one in ("plain", "ngram"))
            if temperature == 0.0 and plain["token_ids"] != ngram["token_ids"]:
                raise SystemExit("greedy tokens differ with drafts")
            print(
                f"{name}: {ngram['rate']:.2f} of drafted tokens accepted, {ngram['length']:.2f} tokens per draft; "
                f"{plain['tokens_per_s']:,.0f} tokens/s without drafts, {ngram['tokens_per_s']:,.0f} with; "
                f"ratio {ngram['tokens_per_s'] / plain['tokens_per_s']:.2f}"
            )


if __name__ == "__main__":
    main()
