"""Images of rows: from any source to pixels and spans of tokens."""

import base64
import io
import pickle
import random
import re

import pytest
from PIL import Image
from rich.console import Console

from nemo_rl.algorithms.data_preview import PreviewInputs, PromptPreview, show_rows
from nemo_rl.data.chat.images import ImageReader, image_digest, image_marks, read_image
from nemo_rl.data.chat.messages import ObservationRenderer
from nemo_rl.data.datasets import shapes
from nemo_rl.data.interfaces import TaskDataSpec
from nemo_rl.data.rows.example_processors import sft_processor
from nemo_rl.data.rows.examples import ExampleMaker
from nemo_rl.data.rows.processors import conversation_processor, math_hf_data_processor
from nemo_rl.data.rows.setup import PromptProcessor, Task
from nemo_rl.data.tiny_model import RECIPES, build_processor, build_tiny_tokenizer
from tests.conversations import assistant, user
from tests.tables import named
from tests.unit.data.test_examples import prompt
from tests.unit.policy.test_vision import gemma3_processor

SCENE = "red circle 0,blue square 4"
DRAWN, TOKENS = (f"shapes:{SCENE}",), 9


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """A directory with the tiny processor."""
    directory = str(tmp_path_factory.mktemp("model"))
    build_processor(RECIPES["shapes"], TOKENIZER).save_pretrained(directory)
    return directory


TOKENIZER = build_tiny_tokenizer(RECIPES["shapes"])


def test_one_image_from_every_source(tmp_path):
    image, file = shapes.draw(SCENE), tmp_path / "image.png"
    image.save(file)
    png = file.read_bytes()
    url = "data:image/png;base64," + base64.b64encode(png).decode()
    sources = [f"shapes:{SCENE}", image, png, str(file), file, file.as_uri(), url]
    sources += [{"bytes": png, "path": None}, {"bytes": None, "path": str(file)}]
    assert {image_digest(read_image(source)) for source in sources} == {image_digest(image)}


def damaged_png() -> bytes:
    """In the middle of the file."""
    file = io.BytesIO()
    Image.frombytes("RGB", (256, 256), random.Random(0).randbytes(3 * 256 * 256)).save(file, "PNG")
    first, second, third, *rest = file.getvalue().split(b"IDAT")  # chunks of 64 KiB, each with its name
    return b"IDAT".join([first, second]) + bytes(4) + b"IDAT".join([third, *rest])


@named(
    "source, message",
    {
        "bytes": (b"no image", "image of bytes cannot be read: it is no image that Pillow can decode"),
        "no file": ("missing.png", "image 'missing.png' cannot be read: .*No such file"),
        "nothing": ({"bytes": None, "path": None}, "a source is a path, a URL, bytes"),
        "number": (7, "not a int"),
        "damaged": (damaged_png(), "image of bytes cannot be read: broken PNG file"),
        "shape": ("shapes:red circle 99", "'red circle 99' is no shape"),
        "data URL": ("data:image/png;base64,???", "cannot be read"),
    },
)
def test_a_source_that_is_no_image(source, message):
    with pytest.raises(ValueError, match=message):
        read_image(source)


def parts(*texts_and_images: object) -> list[dict]:
    kinds = [("text", part) if isinstance(part, str) else ("image", part[0]) for part in texts_and_images]
    return [{"type": kind, kind: part} for kind, part in kinds]


def example_maker(model) -> ExampleMaker:
    return ExampleMaker(
        {"t": Task(spec=TaskDataSpec("t"), processor=sft_processor)}, TOKENIZER, 128, images=ImageReader(model)
    )


def prompts(reader, processor=math_hf_data_processor, spec=None) -> PromptProcessor:
    return PromptProcessor({"t": Task(spec=spec or TaskDataSpec("t"), processor=processor)}, TOKENIZER, 128, reader)


def test_a_conversation_with_images_between_its_texts(model):
    both = parts(DRAWN, "Which?", ("shapes:green triangle 8",), "And?")
    messages = [user(both), assistant("one"), user(parts(DRAWN)), assistant("two")]
    [example], meta = pickle.loads(pickle.dumps(example_maker(model))).make(prompt({"messages": messages}))
    ids, pad = example.token_ids, TOKENIZER.convert_tokens_to_ids("<|image_pad|>")
    assert [(ids[span.start : span.start + span.length] == pad).all() for span in example.images] == [True] * 3
    assert meta.problem is None and (ids == pad).sum() == 3 * TOKENS
    first, second, third = (span.digest for span in example.images)
    assert first == third != second and example.pixels.keys() == {first, second}  # the first image is processed once
    assert TOKENIZER.decode(ids[example.token_mask]) == "one<eos>two<eos>"
    text = "<|user|>[]Which?[]And?<eos><|assistant|>one<eos><|user|>[]<eos><|assistant|>two<eos>"
    marks = "<|vision_start|>" + TOKENS * "<|image_pad|>" + "<|vision_end|>"
    assert TOKENIZER.decode(ids) == text.replace("[]", marks)


@pytest.mark.parametrize("processor", [math_hf_data_processor, conversation_processor])
def test_a_prompt_with_an_image(model, tmp_path, processor):
    (tmp_path / "prompt.txt").write_text("Look: {}")
    process = prompts(ImageReader(model), processor, TaskDataSpec("t", prompt_file=tmp_path / "prompt.txt"))
    row = {"problem": parts(DRAWN, "How many?"), "expected_answer": "2"}
    if processor is conversation_processor:
        row["messages"] = [user(row["problem"])]
    datum = process(prompt(row))
    [span] = datum["images"]
    assert span.length == TOKENS and datum["pixels"].keys() == {span.digest}
    assert datum["pixels"][span.digest]["image_grid_thw"].tolist() == [[1, 6, 6]]
    text = "<|user|><|vision_start|><|image_pad|><|vision_end|>Look: How many?<eos><|assistant|>"
    assert "".join(message["content"] for message in datum["message_log"]) == text
    assert datum["extra_env_info"]["ground_truth"] == "2"
    assert datum["extra_env_info"].get("num_images") == (1 if processor is conversation_processor else None)


VIDEO = {"type": "video", "video": "a", "text": None}


@pytest.mark.parametrize(
    ("reads", "content", "message"),
    [
        (True, parts((b"no",), "?"), "row rows:7: image of bytes cannot be read"),
        (True, parts("<|image_pad|> ?"), "row rows:7: a text contains <|image_pad|>"),
        (True, "<|image_pad|> ?", "row rows:7: a text contains <|image_pad|>"),
        (True, parts(DRAWN, DRAWN, DRAWN), "row rows:7: 3 images, more than data.max_images=2"),
        (True, parts((Image.new("RGB", (4000, 4)),)), "row rows:7: an image of 4000x4 pixels does not suit the model"),
        (True, [*parts(DRAWN), VIDEO], "row rows:7: a content has a part of type 'video'"),
        (False, parts(DRAWN), "row rows:7: it has images, and the model reads only text"),
        # what an environment says
        (True, [user(parts(DRAWN, DRAWN))], "3 images in one episode, more than data.max_images=2"),
        (False, [user(parts(DRAWN))], "an observation has images, and the model reads only text"),
    ],
)
def test_what_cannot_be_shown_is_named(reads, content, message, model):
    reader = ImageReader(model, max_images=2) if reads else None
    with pytest.raises(ValueError, match=re.escape(message)):
        if isinstance(content, list) and "role" in content[0]:
            ObservationRenderer(TOKENIZER, reader)(content[0], sampled=[], num_images=1)
        prompts(reader)(prompt({"problem": content, "expected_answer": ""}))


def test_a_row_whose_messages_are_no_messages_is_a_problem_of_the_row(model):
    _, meta = example_maker(model)(prompt({"messages": ["Which?", {"role": "user", "content": "a"}]}))
    assert meta.problem_kind == "bad_row" and "column 'messages' must hold" in meta.problem


def test_both_marks_of_gemma_3_are_known(tmp_path):
    """Its processor replaces one token by another."""
    gemma3_processor(RECIPES["shapes"], TOKENIZER).save_pretrained(tmp_path)
    assert image_marks(str(tmp_path)) == {"<|vision_start|>", "<|image_pad|>"}


def test_people_see_the_image_in_a_preview(model):
    make, file = PromptPreview(prompts(ImageReader(model))), io.StringIO()
    console = Console(file=file, width=80, force_terminal=True, color_system="truecolor")
    asked = prompt({"problem": parts((Image.new("RGB", (160, 80), (200, 30, 30)),), "?"), "expected_answer": ""})
    show_rows(console, PreviewInputs(prompts=[asked], total=1, make=make, tokenizer=TOKENIZER), 1)
    assert "images: 1" in file.getvalue() and file.getvalue().count("▀") == 48 * 24 // 2
    assert re.search(r"38;2;(19[89]|20[012]);(29|30|31);(29|30|31);48;2;", file.getvalue())


def test_an_observation_with_an_image_continues_as_a_conversation_would(model):
    said = user(parts("Look: ", ("sliding_puzzle:1 2\n_ 3",), "And?"))
    messages = [user(parts(DRAWN, "Which?")), assistant("one"), said, assistant("two")]
    [whole], _ = example_maker(model)(prompt({"messages": messages}))
    pixels = {}
    render = pickle.loads(pickle.dumps(ObservationRenderer(TOKENIZER, ImageReader(model))))
    ids, [span], text = render(said, sampled=TOKENIZER.encode("one"), pixels=pixels)
    assert text == "Look: <|image_pad|>And?"
    start = len(TOKENIZER.encode("<|user|>Which?<eos><|assistant|>one")) + TOKENS + 2
    end = whole.token_ids.tolist().index(TOKENIZER.encode("t")[0], start)
    assert whole.token_ids[start : start + len(ids)].tolist() == ids and end == start + len(ids)
    assert [start + span.start, span.length] == [whole.images[1].start, whole.images[1].length]
    assert pixels.keys() == {span.digest} == {whole.images[1].digest}
