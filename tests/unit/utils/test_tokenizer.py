import pytest

from nemo_rl.data.tiny_model import build_tiny_tokenizer
from nemo_rl.models.policy.config import TokenizerConfig
from nemo_rl.utils.tokenizer import get_tokenizer
from tests.conversations import answered
from tests.unit.policy.models import edit_json


@pytest.fixture
def saved(tmp_path):
    build_tiny_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def load(path, chat_template="default", **kwargs):
    return get_tokenizer(TokenizerConfig(name=str(path), chat_template=chat_template, **kwargs))


def render(tokenizer, **kwargs):
    return tokenizer.apply_chat_template(answered("b", "a"), tokenize=False, **kwargs)


def test_a_template_is_text_a_file_or_missing(saved):
    text = "{% for m in messages %}({{ m.content }}){% endfor %}"
    (saved / "t.jinja").write_text(text)
    assert render(load(saved, text)) == render(load(saved, str(saved / "t.jinja"))) == "(a)(b)"
    with pytest.raises(FileNotFoundError, match=r"none\.jinja"):
        load(saved, "none.jinja")
    with pytest.raises(ValueError, match="neither default"):
        load(saved, "defualt")
    (saved / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match=r"policy\.tokenizer\.chat_template"):
        load(saved)
    assert render(load(saved, None)) == "ab"


def test_template_arguments_are_defaults_that_a_saved_copy_keeps(saved, tmp_path):
    text = "{{ 'think' if thinking else 'no' }}{{ names | join('+') }}{{ opt.a is none }}{{ opt[1] }}"
    defaults = {"thinking": True, "names": ["x", 'y"'], "opt": {"a": None, 1: 0.5}}
    tokenizer = load(saved, text, chat_template_kwargs=defaults)
    assert render(tokenizer) == 'thinkx+y"True0.5'
    assert render(tokenizer, thinking=False) == 'nox+y"True0.5'
    tokenizer.save_pretrained(tmp_path)
    assert render(load(tmp_path)) == 'thinkx+y"True0.5'


def test_a_missing_pad_token_becomes_the_end_token_and_is_said(saved, caplog):
    edit_json(saved / "tokenizer_config.json", pad_token=None)
    tokenizer = load(saved)
    assert tokenizer.pad_token == tokenizer.eos_token == "<eos>"
    assert "no pad token" in caplog.text
