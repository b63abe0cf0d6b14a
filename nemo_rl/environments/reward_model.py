"""A reward model as an environment: reward is its score of the whole conversation, after one turn."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jinja2.exceptions import TemplateError
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerFast

from nemo_rl.environments.config import RewardModelEnvironmentConfig
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn, FinishedSamples, one_turn
from nemo_rl.environments.rewards import conversation_of, prompt_and_episode
from nemo_rl.types import LLMMessageLogType
from nemo_rl.utils.checkpoint.tensors import holds_tensors, load_tensors, saved_tensors
from nemo_rl.utils.control_tokens import hide, tokenise
from nemo_rl.utils.tokenizer import get_tokenizer, strftime_now, takes_control_tokens


class RewardModelFiles(NamedTuple):
    """`model`: a Hugging Face directory or name. `weights`: the folder of its tensors; None: `model` itself."""

    model: str
    tokenizer: str
    weights: Path | None = None


def find_reward_model(name: str) -> RewardModelFiles:
    """The files of a Hugging Face model, or of a checkpoint: `step_N`, or the `policy` in it.

    ValueError for a checkpoint that holds adapters only.
    """
    for policy in (Path(name) / "policy", Path(name)):
        weights = policy / "weights"
        if (weights / "consolidated" / "config.json").is_file():
            return RewardModelFiles(str(weights / "consolidated"), str(policy / "tokenizer"))
        if (policy / "config.json").is_file() and weights.is_dir() and holds_tensors(weights):
            if any(tensor.endswith(".lora_A") for tensor in saved_tensors(weights)):
                raise ValueError(
                    f"{name} holds adapters without their base model; train with checkpointing.save_consolidated=true, "
                    "which writes the merged model, or load it with PEFT (policy/adapter), merge and save_pretrained it"
                )
            return RewardModelFiles(str(policy), str(policy / "tokenizer"), weights)
    return RewardModelFiles(name, name)


def load_reward_model(files: RewardModelFiles, dtype: torch.dtype) -> PreTrainedModel:
    """A classifier of transformers with one label, in evaluation mode, on the CPU.

    ValueError for another model, or missing files or weights.
    """
    try:
        config = AutoConfig.from_pretrained(files.model)
    except (OSError, ValueError) as error:
        raise ValueError(f"model_name: the reward model {files.model!r} cannot be loaded: {error}") from error
    kind = (config.architectures or ["a model of unknown architecture"])[0]
    is_classifier = kind.endswith("ForSequenceClassification")
    if not is_classifier or config.num_labels != 1:
        labels = f" with {config.num_labels} labels" if is_classifier else ""
        raise ValueError(
            f"model_name: {files.model!r} is no reward model but {kind}{labels}; wanted is a sequence classifier with "
            "one label, as examples/run_rm.py trains them"
        )
    if "vision_config" in config.sub_configs:
        raise ValueError(f"model_name: {files.model!r} is a {kind}, which sees images; this environment scores texts")
    if files.weights is not None:
        model = AutoModelForSequenceClassification.from_config(config, dtype=dtype)
        load_tensors(model.state_dict(), files.weights)
        return model.eval()
    loaded: Any = AutoModelForSequenceClassification.from_pretrained(files.model, dtype=dtype, output_loading_info=True)
    model, loading = loaded
    if loading["missing_keys"]:
        missing = ", ".join(sorted(loading["missing_keys"])[:4])
        raise ValueError(f"model_name: {files.model!r} has no weights for {missing}")
    return model.eval()


def _score_layer(model: PreTrainedModel) -> torch.nn.Linear:
    """The layer from a state to the score: the linear layer with one output outside the base model."""
    beside = [child for name, child in model.named_children() if name != model.base_model_prefix]
    layers = [layer for child in beside for layer in child.modules() if isinstance(layer, torch.nn.Linear)]
    layers = [layer for layer in layers if layer.out_features == 1]
    if len(layers) != 1:
        raise ValueError(
            f"model_name: {type(model).__name__} has {len(layers)} linear layers with one output beside its base "
            "model; wanted is a model that has one, which gives the score"
        )
    return layers[0]


class RewardModelEnvironment(EnvironmentInterface[Any]):
    """Scores `metadata["messages"]`, of `conversation_processor`, and the turns after them, by the last token's state.

    The last layer always computes in float32, as training of reward models does: in bfloat16, scores near 1 are 2^-7
    apart, and the samples of a group would often tie.
    """

    def __init__(self, cfg: RewardModelEnvironmentConfig | Mapping[str, Any]) -> None:
        self.cfg = cfg = RewardModelEnvironmentConfig.model_validate(cfg)
        self.device = torch.device("cuda" if cfg.resources.gpus_per_node else "cpu")
        source = cfg.checkpoint_path or cfg.model_name
        files = find_reward_model(source)
        if cfg.checkpoint_path is not None and files.model == source:
            raise ValueError(f"checkpoint_path: {source!r} is no checkpoint; give a step_N directory")
        name = files.tokenizer if cfg.tokenizer.name == cfg.model_name else cfg.tokenizer.name
        self.tokenizer: PreTrainedTokenizerFast = get_tokenizer(cfg.tokenizer.model_copy(update={"name": name}))
        model: Any = load_reward_model(files, getattr(torch, cfg.precision))
        self.model = model.to(self.device)
        layer = _score_layer(self.model).float()
        layer.register_forward_pre_hook(lambda _, states: tuple(state.float() for state in states))
        text = self.model.config.get_text_config()
        if text.pad_token_id is None:
            text.pad_token_id = self.tokenizer.pad_token_id
        self.pad_token_id: Any = text.pad_token_id
        self.max_length = cfg.max_total_sequence_length or text.to_dict().get("max_position_embeddings")

    def tokenize(self, conversation: Sequence[Mapping[str, str]]) -> list[int]:
        """The tokens of a conversation. ValueError when the template refuses it, or it is too long."""
        # Chat templates know the role `user` for the other side, and no role `environment`.
        messages = [{**message, "role": message["role"].replace("environment", "user")} for message in conversation]
        if not takes_control_tokens(self.tokenizer.get_chat_template()):
            messages = [m if m["role"] == "assistant" else hide(m, self.tokenizer) for m in messages]
        try:
            text = str(self.tokenizer.apply_chat_template(messages, tokenize=False, strftime_now=strftime_now))
        except TemplateError as error:
            roles = ", ".join(message["role"] for message in messages)
            raise ValueError(
                f"the chat template of the reward model refuses the roles {roles}: {error}; give another with "
                "tokenizer.chat_template"
            ) from error
        bos, eos = str(self.tokenizer.bos_token or ""), str(self.tokenizer.eos_token)
        if self.cfg.add_bos and not text.startswith(bos):
            text = bos + text
        if self.cfg.add_eos and not text.rstrip().endswith(eos):
            text += eos
        ids, _ = tokenise(text, self.tokenizer)
        if self.max_length is not None and len(ids) > self.max_length:
            raise ValueError(
                f"a conversation of {len(ids)} tokens is longer than the {self.max_length} that the reward model "
                "scores; raise max_total_sequence_length, or sample shorter conversations"
            )
        return ids

    @torch.inference_mode()
    def score(self, conversations: Sequence[Sequence[Mapping[str, str]]]) -> torch.Tensor:
        """float32 [len(conversations)] on the CPU, in their order."""
        rows = [torch.tensor(self.tokenize(conversation)) for conversation in conversations]
        order = sorted(range(len(rows)), key=lambda number: len(rows[number]))
        scores = torch.zeros(len(rows))
        for begin in range(0, len(order), self.cfg.batch_size):
            numbers = order[begin : begin + self.cfg.batch_size]
            batch = [rows[number] for number in numbers]
            padded = pad_sequence(batch, batch_first=True, padding_value=self.pad_token_id).to(self.device)
            mask = pad_sequence([torch.ones_like(row) for row in batch], batch_first=True).to(self.device)
            logits = self.model(input_ids=padded, attention_mask=mask, use_cache=False).logits
            assert logits.dtype == torch.float32
            scores[numbers] = logits[:, 0].cpu()
        return scores.sigmoid() if self.cfg.sigmoid else scores

    def step(self, message_log_batch: list[LLMMessageLogType], metadata: list[Any]) -> EnvironmentReturn[Any]:
        """One turn, then the episode is over. ValueError as `tokenize`, or without the conversation."""
        conversations = []
        for log, known in zip(message_log_batch, metadata, strict=True):
            # The prompt in `log` has gone through the policy's chat template.
            said, (_, turns) = conversation_of(known, reader="reward model"), prompt_and_episode(log)
            conversations.append([*said, *({"role": turn["role"], "content": str(turn["content"])} for turn in turns)])
        scores = self.score(conversations)
        return one_turn([f"reward {score:.4f}" for score in scores.tolist()], metadata, scores)

    def global_post_process_and_metrics(self, batch: FinishedSamples) -> tuple[FinishedSamples, dict[str, float]]:
        """Metrics of a batch with `rewards` [B], `is_end` [B] (ended by itself), `generation_lengths` [B]."""
        rewards = batch["rewards"].float()
        return batch, {
            "reward_mean": rewards.mean().item(),
            "reward_std": rewards.std(correction=0).item(),
            "reward_min": rewards.min().item(),
            "reward_max": rewards.max().item(),
            "fraction_of_samples_properly_ended": batch["is_end"].float().mean().item(),
            "generation_lengths": batch["generation_lengths"].float().mean().item(),
        }
