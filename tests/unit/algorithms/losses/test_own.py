"""A loss of the user's, by import path or as an argument, is made and checked before the run."""

import pickle
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.algorithms.config.grpo import ClippedPGLossConfig, GRPOMasterConfig
from nemo_rl.algorithms.config.loop import LossConfig
from nemo_rl.algorithms.config.supervised import DPOMasterConfig, RMMasterConfig, SFTMasterConfig
from nemo_rl.algorithms.losses.own import chosen_loss, make_loss
from nemo_rl.algorithms.parts.inputs import Inputs
from nemo_rl.config.errors import ConfigError
from nemo_rl.config.loader import load_config
from nemo_rl.types import LossByName, LossInputs, PolicyGradientInputs, loss_name
from tests import own_losses

ROOT = Path(__file__).parents[4]
OWN = "tests.own_losses"


def made(name: str, section: type[LossConfig] = LossConfig, **kwargs: Any) -> Any:
    cfg = section(type=f"{OWN}:{name}", kwargs=kwargs)
    return make_loss(cfg, cfg)


def test_a_class_is_made_with_its_arguments_and_the_section() -> None:
    assert made("Focal").gamma == 2.0 and made("Focal", gamma=0.5).gamma == 0.5
    loss = made("Cautious", ClippedPGLossConfig, weight=0.25)
    assert (loss.weight, loss.cfg.ratio_clip_min, loss.inputs_type) == (0.25, 0.2, PolicyGradientInputs)
    theirs = made("OfNemoRL", ClippedPGLossConfig)
    assert isinstance(theirs, LossByName) and theirs.inputs_type is PolicyGradientInputs
    assert made("OfNemoRL").inputs_type is LossInputs
    assert loss_name(pickle.loads(pickle.dumps(theirs))) == "tests.own_losses.OfNemoRL"


@pytest.mark.parametrize(
    ("name", "kwargs", "told"),
    [
        ("Focal", {"gama": 1.0}, "cannot be made with loss_fn.kwargs={'gama': 1.0}: TypeError"),
        ("Cautious", {}, "cannot be made with loss_fn.kwargs={}: TypeError"),
        ("Focl", {}, "has no 'Focl'"),
        ("ROOT", {}, "has no 'ROOT'"),
        ("token_mean", {}, "is no class"),
        ("WithoutInputs", {}, "has no inputs_type"),
        ("TooFew", {}, "is called as (outputs, inputs, global_valid_seqs, global_valid_toks): too many positional"),
        ("OfLogits", {}, "reads logits"),
        ("LossMetrics", {}, "is no class"),
        ("LossType", {"value": "token_level"}, "has no __call__"),
    ],
)
def test_a_class_that_is_no_loss_is_told_before_the_run(name: str, kwargs: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError) as error:
        made(name, **kwargs)
    assert told in str(error.value) and f"{OWN}:{name}" in str(error.value) and "\n" not in str(error.value)


def test_an_argument_comes_in_place_of_the_algorithms_loss_and_not_beside_a_key() -> None:
    cfg, own = ClippedPGLossConfig(), own_losses.Focal()
    assert chosen_loss(None, cfg) is None and chosen_loss(own, cfg) is own
    assert isinstance(chosen_loss(own_losses.OfNemoRL(), cfg), LossByName)
    with pytest.raises(ValueError, match="the argument loss_fn has no inputs_type"):
        chosen_loss(own_losses.WithoutInputs(), cfg)
    with pytest.raises(ValueError, match="leave one of them out"):
        chosen_loss(own, ClippedPGLossConfig(type="a:B"))


@pytest.mark.parametrize(
    ("model", "file"),
    [(GRPOMasterConfig, "grpo_math"), (SFTMasterConfig, "sft"), (DPOMasterConfig, "dpo"), (RMMasterConfig, "rm")],
)
def test_a_dry_run_looks_at_the_class_and_its_metrics_are_free(model: Any, file: str) -> None:
    def config(*overrides: str) -> Any:
        return load_config(model, ROOT / f"examples/configs/{file}_cpu.yaml", overrides)

    ranked = ["checkpointing.metric_name=train:focal_probability", "checkpointing.keep_top_k=null"]
    with pytest.raises(ConfigError, match="produces train:focal_probability"):
        config(*ranked)
    own = config(f"loss_fn.type={OWN}:Focal", "+loss_fn.kwargs.gamma=1.5", *ranked)
    assert Inputs.of(own).problems == [] and "train/clip_fraction" not in own.known_metrics
    [problem] = Inputs.of(config(f"loss_fn.type={OWN}:TooFew")).problems
    assert problem.path == ("loss_fn",) and "is called as" in problem.message
    with pytest.raises(ConfigError, match=r"loss_fn\.kwargs: is for a loss of your own"):
        config("+loss_fn.kwargs.gamma=1.5")
