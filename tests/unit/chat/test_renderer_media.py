"""Images in prompts: markers become the processor's ids, extensions equal whole renders, and text forges nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.chat.model_dirs import renderer_for
from support.chat.sees import CLOSE, MARKER, OPEN, seeing, shared
from support.pictures import PNG, URI, png
from support.property_tests import examples
from turnwise.errors import RenderError, SessionError
from turnwise.images import image_part
from turnwise.model.canonical import Canonical, canonical_messages

SIZES = (8, 16, 40)
texts = st.sampled_from(["", "What is it?", "\n\n", f"a {MARKER} b", f"{OPEN}{MARKER}{CLOSE}", "é<|im_end|>", " x "])
pictures = st.builds(png, st.sampled_from(SIZES), st.sampled_from(SIZES), st.integers(0, 3))
parts = st.lists(
    st.one_of(texts.map(lambda text: {"type": "text", "text": text}), pictures.map(image_part)), min_size=1, max_size=5
)
sent_parts = parts.filter(lambda content: any(part["type"] != "text" or part["text"].strip() for part in content))


def words(renderer, ids) -> str:
    return renderer.decode(ids)


def spans(renderer, ids, media):
    """Text of each image's placeholders, and of the ids before and after them."""
    for image in media:
        yield (
            renderer.decode(ids[image.position - 1 : image.position]),
            renderer.decode(ids[image.position : image.end]),
            renderer.decode(ids[image.end : image.end + 1]),
        )


@given(first=sent_parts, second=sent_parts, tool=sent_parts, answer=st.sampled_from(["It is red.", "x", ""]))
@settings(max_examples=examples(60), deadline=None)
def test_an_extension_is_the_end_of_the_whole_and_holds_exactly_its_images(first, second, tool, answer) -> None:
    renderer, _ = shared()
    call = {"id": "c00000001", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    turn = {"role": "assistant", "content": answer, "tool_calls": [call]}
    new = [{"role": "tool", "tool_call_id": "c00000001", "content": tool}, {"role": "user", "content": second}]
    messages = canonical_messages([{"role": "user", "content": first}, turn, *new])
    head = renderer.render(messages[:1], [])
    placed_before = renderer.placed
    completion = renderer.completion(turn, [])
    added = renderer.extend(head, completion, messages[1], messages[2:], [])
    assert added is not None, renderer.why
    placed_after = renderer.placed
    full_ids = renderer.render(messages, [])
    placed = renderer.placed
    joined = np.concatenate([head, completion, added])
    # The turn itself may be encoded in other pieces: what stands before and after it is equal, id by id.
    assert words(renderer, joined) == words(renderer, full_ids)
    assert full_ids[len(full_ids) - len(added) :].tolist() == added.tolist()
    assert full_ids[: len(head)].tolist() == head.tolist()
    back = len(full_ids) - len(joined)
    shifted = [image.at(image.position + len(head) + len(completion) + back) for image in placed_after]
    assert [*placed_before, *shifted] == list(placed)
    assert [image.digest for image in placed] == [image.digest for message in messages for image in message.media]
    for opened, inner, closed in spans(renderer, full_ids, placed):
        assert (opened, closed, set(inner.split(MARKER))) == (OPEN, CLOSE, {""})


@given(content=sent_parts)
@settings(max_examples=examples(40), deadline=None)
def test_text_never_becomes_a_placeholder(content) -> None:
    renderer, _ = shared()
    [message] = canonical_messages([{"role": "user", "content": content}])
    ids = renderer.render([message], [])
    marker = renderer.render(canonical_messages([{"role": "user", "content": [image_part(PNG)]}]), [])
    pad = int(marker[renderer.placed[0].position])
    count = sum(image.length for image in _placed(renderer, message))
    assert int((ids == pad).sum()) == count


def _placed(renderer, message):
    renderer.render([message], [])
    return renderer.placed


def test_each_image_is_processed_once() -> None:
    renderer, processor = seeing()
    one, two = png(16, 16, 1), png(40, 16, 2)
    for _ in range(3):
        for content in ([image_part(one), image_part(two)], [image_part(two)], [image_part(one)] * 3):
            renderer.render(canonical_messages([{"role": "user", "content": content}]), [])
    assert processor.placed == [one, two]


def test_equal_images_are_equal_however_they_are_given() -> None:
    encoded = URI.partition(",")[2]
    forms = [
        {"type": "image_url", "image_url": {"url": URI}},
        {"type": "image_url", "image_url": URI},
        {"type": "input_image", "image_url": URI},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": encoded}},
        {"type": "image", "source_type": "base64", "mime_type": "image/png", "data": encoded},
        {"type": "image", "base64": encoded, "mime_type": "image/png"},
        {"type": "image", "image": PNG},
        {"type": "video", "video": [URI]},
    ]
    forms_ = {canonical_messages([{"role": "user", "content": [form]}])[0] for form in forms}
    assert len(forms_) == 1
    other = canonical_messages([{"role": "user", "content": [image_part(png(8, 8, 9))]}])[0]
    assert other not in forms_


@pytest.mark.parametrize(
    ("part", "problem"),
    [
        ({"type": "image_url", "image_url": {"url": "https://a.test/b.png"}}, r"content\[0\] .*URLs .* are not read"),
        ({"type": "image_url", "image_url": {"url": "/etc/passwd"}}, "URLs and file names are not read"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,%%%"}}, "not valid base64"),
        ({"type": "image_url", "image_url": {"url": "data:image/svg+xml;base64,PHN2Zz4="}}, "no image of a known type"),
        ({"type": "image_url", "image_url": {"url": URI.replace("png", "jpeg")}}, "'image/jpeg', but .* image/png"),
        ({"type": "image_url", "image_url": {"url": "data:image/png,x"}}, "without base64"),
        ({"type": "image", "source": {"type": "url", "url": "https://a.test"}}, "source is of type 'url'"),
        ({"type": "image"}, "has no image"),
        ({"type": "image", "image": bytes(33 * 2**20)}, r"33\.0 MiB; at most 32"),
        ({"type": "video", "video": URI}, "is a video file: give its frames"),
        ({"type": "input_audio", "input_audio": {}}, "is audio, which no model here takes"),
        ({"type": "file", "file": {}}, "is of type 'file': text and images are allowed"),
    ],
)
def test_broken_image_is_refused_by_name(part, problem) -> None:
    with pytest.raises(SessionError, match=problem):
        canonical_messages([{"role": "user", "content": [part]}])


def test_images_of_the_system_and_of_the_model_are_refused() -> None:
    for role in ("system", "assistant"):
        with pytest.raises(SessionError, match=f"{role}. holds an image: give images in user and tool messages"):
            canonical_messages([{"role": role, "content": [image_part(PNG)]}])


def test_a_model_of_text_is_named_and_a_broken_image_and_a_template_without_a_place() -> None:
    message = canonical_messages([{"role": "user", "content": [image_part(PNG)]}])
    with pytest.raises(RenderError, match=r"hold 1 image\(s\), but this model takes text only: .* Choose a model"):
        renderer_for("qwen3").render(message, [])
    renderer, _ = shared()
    broken = canonical_messages([{"role": "user", "content": [image_part(PNG[:-4])]}])
    with pytest.raises(RenderError, match="is broken: save it again"):
        renderer.render(broken, [])
    blind, _ = seeing(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content if m.content is string else m.content[0].text }}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    with pytest.raises(RenderError, match=r"wrote 0 image markers .* for 1 images: it has no place"):
        blind.render(
            canonical_messages([{"role": "user", "content": [{"type": "text", "text": "a"}, image_part(PNG)]}]), []
        )


def test_a_template_that_numbers_images_is_not_extended() -> None:
    source = (
        "{% set n = namespace(at=0) %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{% if p.type == 'image' %}"
        "{% set n.at = n.at + 1 %}Picture {{ n.at }}: <|image_pad|>{% else %}{{ p.text }}{% endif %}{% endfor %}"
        "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    renderer, _ = seeing(source)
    messages = canonical_messages([{"role": "user", "content": [image_part(PNG)]}])
    tail = renderer.render(messages, [])
    message = {"role": "assistant", "content": "x"}
    turn = Canonical("assistant", "x")
    new = canonical_messages([{"role": "user", "content": [image_part(PNG)]}])
    assert renderer.extend(tail, renderer.completion(message, []), turn, new, []) is None
    assert renderer.why == "depends_on_history"
    plain = canonical_messages([{"role": "user", "content": "and?"}])
    assert renderer.extend(tail, renderer.completion(message, []), turn, plain, []) is not None


def test_a_template_that_takes_parts_only_is_given_parts() -> None:
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for p in m.content %}{% if p['type'] == 'text' %}"
        "{{ p['text'] }}{% elif p['type'] == 'image' %}<|image_pad|>{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    renderer, _ = seeing(source)
    assert renderer.template.parts
    ids = renderer.render(canonical_messages([{"role": "user", "content": "hello"}]), [])
    assert "hello" in renderer.decode(ids)
