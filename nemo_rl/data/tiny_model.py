"""The models named `tiny:...`, made on this machine in twenty seconds to a minute, without a download.

    tiny:arithmetic          Qwen2, 0.3M parameters, embeddings and head tied
    tiny:arithmetic-moe      Qwen3-MoE, 0.6M parameters, 4 experts of which each token uses 2, embeddings and head apart
    tiny:arithmetic-teacher  the first without mistakes at the end of its warm-up: right nearly always
    tiny:shapes              Qwen2.5-VL, which sees images

Each writes `\\boxed{12}` for the problem `5+7` of the generated arithmetic dataset, in the chat format of its
byte-level tokenizer. A short supervised warm-up ends on demonstrations of which a part is off by one. So the model
knows the answers and is not sure of them: sampled at temperature 1 it is right in about four problems of ten, decoded
greedily in fewer, and reinforcement learning has something to improve.

A model for another task is an entry in `RECIPES` and a function in `DEMONSTRATIONS`. The same machine and package
versions give the same bytes: seeds, thread count and file order are fixed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_rl.config.errors import did_you_mean
from nemo_rl.utils.files import make_once
from nemo_rl.utils.folders import cache_root
from nemo_rl.utils.registry import import_object

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

TINY_MODEL_PREFIX = "tiny:"
RECIPE_VERSION = 2  # raise it when the code below changes the models

BOXED = "\\boxed{"
ROLES = ("system", "user", "assistant", "environment", "tool")
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|' + message['role'] + '|>' + message['content'] + '<eos>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
VISION_CHAT_TEMPLATE = (
    "{%- for message in messages -%}{{- '<|' + message['role'] + '|>' -}}"
    "{%- if message['content'] is string -%}{{- message['content'] -}}{%- else -%}"
    "{%- for part in message['content'] -%}"
    f"{{%- if part['type'] == 'image' -%}}{IMAGE}{{%- else -%}}{{{{- part['text'] -}}}}{{%- endif -%}}"
    "{%- endfor -%}{%- endif -%}{{- '<eos>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)
MAX_SIDE = 256  # pixels; larger images are made smaller

# Task -> function `(rng, mistake_probability)` that returns one conversation of {"role", "content"}, roles as in
# `ROLES`. It takes all randomness from `rng`. The warm-up learns every assistant turn and its end, and nothing else.
# `arithmetic` returns a batch of them and takes its size, `max_operand` and `operators`, too.
DEMONSTRATIONS = {
    "arithmetic": "nemo_rl.data.datasets.arithmetic:demonstrate_arithmetic",
    "code_arithmetic": "nemo_rl.data.datasets.arithmetic:demonstrate_code_arithmetic",
    "tool_arithmetic": "nemo_rl.data.datasets.arithmetic:demonstrate_tool_arithmetic",
    "judgements": "nemo_rl.data.datasets.arithmetic:demonstrate_judgement",
    "lookup": "nemo_rl.data.datasets.lookup:demonstrate_lookup",
    "sums_and_lookups": "nemo_rl.data.datasets.lookup:demonstrate_sum_or_lookup",
    "sliding_puzzle": "nemo_rl.data.datasets.sliding_puzzle:demonstrate_sliding_puzzle",
    "shapes": "nemo_rl.data.datasets.shapes:demonstrate_shapes",
}


@dataclass(frozen=True, kw_only=True)
class TinyModelRecipe:
    """Everything that determines the bytes of a tiny model, except package versions and the task's demonstrations."""

    task: str = "arithmetic"  # in DEMONSTRATIONS
    hidden_size: int = 128
    num_layers: int = 2
    head_dim: int = 32  # the smallest that vLLM's CPU attention takes
    num_kv_heads: int = 2
    num_experts: int = 0  # 0: dense
    max_position_embeddings: int = 2048
    initializer_range: float = 0.06  # with tied embeddings and so few steps, 0.02 learns three times slower
    max_operand: int = 9  # of the task arithmetic
    operators: str = "+-"  # of the task arithmetic
    num_clean_steps: int = 300
    num_doubtful_steps: int = 60  # the last steps, with wrong answers among the demonstrations
    batch_size: int = 64
    learning_rate: float = 4e-3
    mistake_probability: float = 0.54
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class TinyVisionRecipe(TinyModelRecipe):
    """A tiny model that sees images."""

    vision_size: int = 64
    vision_layers: int = 2
    patch_size: int = 8
    merge_size: int = 2


RECIPES: dict[str, TinyModelRecipe] = {
    "arithmetic": TinyModelRecipe(),
    "arithmetic-moe": TinyModelRecipe(num_experts=4),
    "arithmetic-teacher": TinyModelRecipe(num_clean_steps=360, num_doubtful_steps=0),
    "code": TinyModelRecipe(task="code_arithmetic", num_clean_steps=200),
    "tools": TinyModelRecipe(task="tool_arithmetic", num_clean_steps=200, batch_size=32),
    "sums-and-lookups": TinyModelRecipe(task="sums_and_lookups", num_clean_steps=400, batch_size=32),
    "retrieval": TinyModelRecipe(task="lookup", num_clean_steps=300, batch_size=32),
    "judge": TinyModelRecipe(task="judgements", num_clean_steps=600, num_doubtful_steps=0, batch_size=32),
    "sliding-puzzle": TinyModelRecipe(
        task="sliding_puzzle", num_clean_steps=60, num_doubtful_steps=80, batch_size=16, mistake_probability=0.6
    ),
    "shapes": TinyVisionRecipe(task="shapes", num_clean_steps=200, num_doubtful_steps=50, learning_rate=2e-3),
}


def resolve_tiny_model(name: str) -> str:
    """The directory of the model `tiny:<recipe>`, which is made on first use.

    Raises ValueError for an unknown recipe.
    """
    recipe = _recipe(name)
    directory = f"tiny-{name.removeprefix(TINY_MODEL_PREFIX)}-{recipe_hash(recipe)}"
    return ensure_tiny_model(cache_root() / directory, recipe)


def _recipe(name: str) -> TinyModelRecipe:
    known = {TINY_MODEL_PREFIX + recipe_name: recipe for recipe_name, recipe in RECIPES.items()}
    if name not in known:
        raise ValueError(f"there is no model {name!r}; {did_you_mean(name, known)}")
    return known[name]


def tiny_model_config(name: str) -> PretrainedConfig:
    """The configuration of the model `tiny:<recipe>`, without making the model.

    Raises ValueError for an unknown recipe.
    """
    recipe = _recipe(name)
    return untrained_config(recipe, build_tiny_tokenizer(recipe))


def recipe_hash(recipe: TinyModelRecipe) -> str:
    """A hash of the recipe, of demonstrations of its task and of package versions: 12 hexadecimal digits."""
    import tokenizers
    import torch
    import transformers

    identity = {
        "recipe": asdict(recipe),
        "demonstrations": _demonstrations(recipe, random.Random(recipe.seed), recipe.mistake_probability),
        "version": RECIPE_VERSION,
        "chat_template": CHAT_TEMPLATE,
        "packages": [torch.__version__, transformers.__version__, tokenizers.__version__],
    }
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]


def ensure_tiny_model(directory: str | Path, recipe: TinyModelRecipe = RECIPES["arithmetic"]) -> str:
    """The directory of a finished tiny model, which is made if it does not exist. Safe with several processes."""

    def make(work: Path) -> None:
        import torch

        logger.info("making the tiny model in %s (once; a minute, or two with images)", target)
        num_threads = torch.get_num_threads()
        try:
            # One thread: the order of float additions is then fixed, and on busy cores it is also faster for sizes like
            # these.
            torch.set_num_threads(1)
            tokenizer = build_tiny_tokenizer(recipe)
            model = build_untrained_model(recipe, tokenizer)
            processor = build_processor(recipe, tokenizer) if isinstance(recipe, TinyVisionRecipe) else tokenizer
            _warm_up(model, processor, recipe)
            model.generation_config.temperature = 1.0
            model.save_pretrained(work)
            processor.save_pretrained(work)
        finally:
            torch.set_num_threads(num_threads)

    target = Path(directory).expanduser().absolute()
    return str(make_once(target, make))


def build_tiny_tokenizer(recipe: TinyModelRecipe = RECIPES["arithmetic"]) -> PreTrainedTokenizerFast:
    """One token per byte of the text; `\\boxed{` and the role markers are one token each, as are marks of images.

    It is a `Qwen2Tokenizer` because transformers 5 loads that class for every Qwen2 model, whatever the directory says.
    """
    from tokenizers import pre_tokenizers
    from transformers import AddedToken, Qwen2Tokenizer

    is_vision = isinstance(recipe, TinyVisionRecipe)
    marks = VISION_TOKENS if is_vision else ()
    special = ["<pad>", "<eos>", *(f"<|{role}|>" for role in ROLES), *marks]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate([*special, *alphabet, BOXED])},
        merges=[],
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token=None,  # pyrefly: ignore[bad-argument-type]  (annotated str; None means that there is none)
        extra_special_tokens=special[2:],
        clean_up_tokenization_spaces=False,
        model_max_length=recipe.max_position_embeddings,
    )
    tokenizer.add_tokens([AddedToken(BOXED, special=False, normalized=False)])
    tokenizer.chat_template = VISION_CHAT_TEMPLATE if is_vision else CHAT_TEMPLATE
    return tokenizer


def untrained_config(recipe: TinyModelRecipe, tokenizer: PreTrainedTokenizerFast) -> PretrainedConfig:
    """The configuration of the recipe's model."""
    from transformers import Qwen2Config, Qwen3MoeConfig

    vocabulary = tokenizer.get_vocab()
    common = {
        "vocab_size": len(tokenizer),
        "hidden_size": recipe.hidden_size,
        "num_hidden_layers": recipe.num_layers,
        "num_attention_heads": recipe.hidden_size // recipe.head_dim,
        "num_key_value_heads": recipe.num_kv_heads,
        "max_position_embeddings": recipe.max_position_embeddings,
        "initializer_range": recipe.initializer_range,
        "bos_token_id": None,
        "eos_token_id": vocabulary["<eos>"],
        "pad_token_id": vocabulary["<pad>"],
        "dtype": "float32",
    }
    if isinstance(recipe, TinyVisionRecipe):
        return vision_config(recipe, tokenizer, common)
    if recipe.num_experts == 0:
        return Qwen2Config(**common, intermediate_size=2 * recipe.hidden_size, tie_word_embeddings=True)
    return Qwen3MoeConfig(
        **common,
        intermediate_size=2 * recipe.hidden_size,
        head_dim=recipe.head_dim,  # pyrefly: ignore[unexpected-keyword]  (the class does not declare all that its model reads)
        num_experts=recipe.num_experts,
        num_experts_per_tok=2,
        moe_intermediate_size=recipe.hidden_size,
        norm_topk_prob=True,
        tie_word_embeddings=False,
    )


def build_untrained_model(recipe: TinyModelRecipe, tokenizer: PreTrainedTokenizerFast) -> Any:
    """An untrained float32 model whose weights depend on `recipe.seed` only."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    config = untrained_config(recipe, tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        if isinstance(config, Qwen2_5_VLConfig):
            return Qwen2_5_VLForConditionalGeneration(config)
        return AutoModelForCausalLM.from_config(config)


def _demonstrations(
    recipe: TinyModelRecipe, rng: random.Random, mistake_probability: float
) -> list[list[dict[str, str]]]:
    """The conversations of one batch."""
    demonstrate = import_object(DEMONSTRATIONS[recipe.task], "task")
    if recipe.task == "arithmetic":
        space = {"max_operand": recipe.max_operand, "operators": recipe.operators}
        return demonstrate(rng, mistake_probability, recipe.batch_size, **space)
    return [demonstrate(rng, mistake_probability) for _ in range(recipe.batch_size)]


def _warm_up(model: Any, processor: Any, recipe: TinyModelRecipe) -> None:
    import torch

    rng = random.Random(recipe.seed)
    num_steps = recipe.num_clean_steps + recipe.num_doubtful_steps
    encode = encode_with_images if isinstance(recipe, TinyVisionRecipe) else _encode_demonstrations
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    model.train()
    for step in range(num_steps):
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * min(1.0, (step + 1) / 20) * max(0.05, 1 - step / num_steps)
        mistakes = recipe.mistake_probability if step >= recipe.num_clean_steps else 0.0
        parts = encode(_demonstrations(recipe, rng, mistakes), processor)
        num_learned = [int((part["labels"] != -100).sum()) for part in parts]
        for part, number in zip(parts, num_learned, strict=True):
            (_loss(model, part) * (number / sum(num_learned))).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


def _loss(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """The mean negative log-likelihood of the assistant's turns."""
    import torch.nn.functional as F

    targets = inputs.pop("labels")[:, 1:]
    hidden = model.model(**inputs).last_hidden_state[:, :-1]
    learned = targets != -100
    return F.cross_entropy(model.lm_head(hidden[learned]), targets[learned])


def _encode_demonstrations(
    conversations: list[list[dict[str, str]]], tokenizer: PreTrainedTokenizerFast
) -> list[dict[str, torch.Tensor]]:
    """Right-padded `input_ids` and `labels` (-100 on all but the assistant's turns and their ends), int64 [B, S].

    Rows above half of the longest one's length come together, then rows above a quarter of it, and so on: a batch of
    sums and lookups is half padding otherwise.
    """
    import torch
    from torch.nn.utils.rnn import pad_sequence

    messages = [message for conversation in conversations for message in conversation]
    header_ids = tokenizer([f"<|{message['role']}|>" for message in messages], add_special_tokens=False)["input_ids"]
    body_ids = tokenizer([message["content"] + "<eos>" for message in messages], add_special_tokens=False)["input_ids"]
    turns = iter(zip(messages, header_ids, body_ids, strict=True))
    rows: list[tuple[torch.Tensor, torch.Tensor]] = []
    for conversation in conversations:
        ids: list[int] = []
        learned: list[int] = []
        for _ in conversation:
            message, header, body = next(turns)
            ids += header + body
            learned += [-100] * len(header) + (body if message["role"] == "assistant" else [-100] * len(body))
        rows.append((torch.tensor(ids), torch.tensor(learned)))
    longest = max(len(ids) for ids, _ in rows)
    parts = defaultdict(list)
    for row in rows:
        parts[(longest // len(row[0])).bit_length()].append(row)
    filler = {"input_ids": tokenizer.get_vocab()["<pad>"], "labels": -100}
    return [
        {name: pad_sequence([row[i] for row in part], True, filler[name]) for i, name in enumerate(filler)}
        for part in parts.values()
    ]


# -- models that see


def build_processor(recipe: TinyVisionRecipe, tokenizer: PreTrainedTokenizerFast) -> Any:
    """The processor around a tokenizer that has `VISION_TOKENS`: 16 x 16 pixels become one token."""
    from transformers import Qwen2_5_VLProcessor
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

    token = recipe.patch_size * recipe.merge_size
    sizes: dict[str, Any] = {"patch_size": recipe.patch_size, "merge_size": recipe.merge_size}
    return Qwen2_5_VLProcessor(
        Qwen2VLImageProcessor(size={"shortest_edge": token**2, "longest_edge": MAX_SIDE**2}, **sizes),
        tokenizer,
        Qwen2VLVideoProcessor(**sizes),  # never used; the class requires it
        chat_template=tokenizer.chat_template,
    )


def vision_config(recipe: TinyVisionRecipe, tokenizer: PreTrainedTokenizerFast, text: dict[str, Any]) -> Any:
    """The configuration of the recipe's model; `text` are the settings of its language model.

    The first layer of the vision tower sees windows of 2 x 2 tokens, the last all of them.
    """
    from transformers import Qwen2_5_VLConfig

    ids = tokenizer.get_vocab()
    quarter = recipe.head_dim // 8  # time gets a quarter of the rotary frequencies, height and width the rest
    half = (recipe.head_dim // 2 - quarter) // 2
    positions = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [quarter, half, half]}
    return Qwen2_5_VLConfig(
        text_config={**text, "intermediate_size": 2 * recipe.hidden_size, "rope_parameters": positions},
        vision_config={
            "depth": recipe.vision_layers,
            "hidden_size": recipe.vision_size,
            "intermediate_size": 2 * recipe.vision_size,
            "num_heads": recipe.vision_size // recipe.head_dim,
            "patch_size": recipe.patch_size,
            "spatial_merge_size": recipe.merge_size,
            "window_size": 2 * recipe.merge_size * recipe.patch_size,
            "fullatt_block_indexes": [recipe.vision_layers - 1],
            "out_hidden_size": recipe.hidden_size,
            "initializer_range": recipe.initializer_range,
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
        dtype="float32",
    )


def encode_with_images(conversations: list[list[dict[str, Any]]], processor: Any) -> list[dict[str, torch.Tensor]]:
    """Inputs of the model for conversations of a question with images and an answer, right-padded; `labels` are -100
    on all but the answer and its end."""
    import torch

    from nemo_rl.data.chat.images import image_parts, read_image, text_of

    texts, images, answers = [], [], []
    for user, assistant in conversations:
        parts = image_parts(user["content"])
        images += [read_image(part["image"]) for part in parts]
        answer = f"{assistant['content']}<eos>"
        texts.append(f"<|user|>{IMAGE * len(parts)}{text_of(user['content'])}<eos><|assistant|>{answer}")
        answers.append(len(processor.tokenizer(answer, add_special_tokens=False)["input_ids"]))
    made = processor(text=texts, images=images, padding=True, padding_side="right", return_tensors="pt")
    labels = torch.full_like(made["input_ids"], -100)
    for row, (length, answer) in enumerate(zip(made["attention_mask"].sum(1).tolist(), answers, strict=True)):
        labels[row, length - answer : length] = made["input_ids"][row, length - answer : length]
    return [{**made, "labels": labels}]
