import pytest

from nemo_rl.algorithms.config.supervised import DPOLossConfig
from nemo_rl.config.errors import ConfigError
from nemo_rl.config.loader import build_config
from nemo_rl.config.rules import StrictModel
from tests.tables import cases, pattern


class Master(StrictModel):
    dpo: DPOLossConfig


def build(*values: str) -> DPOLossConfig:
    return build_config(Master, {"dpo": {}}, [f"+dpo.{value}" for value in values]).dpo


@pytest.mark.parametrize("average", [True, False])
def test_the_sft_term_is_averaged_when_the_preferences_are(average: bool):
    preferences = f"preference_average_log_probs={average}"
    assert build(preferences).sft_average_log_probs is average
    assert build(preferences, "sft_average_log_probs=false").sft_average_log_probs is False


REFUSED = """
preference_loss=robust -> dpo.label_smoothing ... e.g. 0.1
preference_loss=ipo & label_smoothing=0.1 -> dpo.label_smoothing ... preference_loss=sigmoid
preference_loss=hinge & label_smoothing=0.1 -> dpo.label_smoothing ... set it to 0
label_smoothing=0.5 -> dpo.label_smoothing ... less than 0.5
preference_loss_weight=0 -> dpo.preference_loss_weight ... nothing would be learned
reference_policy_kl_penalty=0 -> dpo.reference_policy_kl_penalty ... nothing would be learned
reference_policy_kl_penalty=0 & preference_loss=ipo & sft_loss_weight=1.0
    -> dpo.reference_policy_kl_penalty ... ipo divides by
reference_policy_kl_penalty=-1 -> dpo.reference_policy_kl_penalty ... greater than or equal to 0
"""


@pytest.mark.parametrize(("values", "told"), cases(REFUSED))
def test_what_cannot_work_is_refused_by_its_key(values: tuple[str, ...], told: str):
    with pytest.raises(ConfigError, match=pattern(told)):
        build(*values)
