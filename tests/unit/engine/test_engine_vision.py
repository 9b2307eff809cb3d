"""Images in the built-in engine and over its wire, against the model's own forward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForImageTextToText

from support.engine.tiny_vlm import FAMILIES, PARAMS, SETS, Runner, image, prompt, reference, vision_model
from turnwise.chat.processor import load_processor
from turnwise.engine.batching.prompt_images import features_cache, read_images
from turnwise.engine.vision import VisionTower
from turnwise.errors import FormatError, RequestRefused
from turnwise.inference.builtin import BuiltinReplica
from turnwise.inference.client import HTTPClient
from turnwise.inference.config import InferenceConfig
from turnwise.inference.wire import BadRequest
from turnwise.model.media_wire import MediaEncoder
from turnwise.trainer.model.weights import PolicyWeights
from turnwise.types import TokenPrompt


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_equal_the_model_for_one_and_several_images(family: str) -> None:
    directory = vision_model(family)
    # Prompts are read in chunks that end within images, beside text.
    runner = Runner(directory, max_batch_tokens=16)
    prompts = [prompt(directory, images) for images in SETS]
    for number, token_prompt in enumerate(prompts):
        runner.submit(str(number), token_prompt)
    text = TokenPrompt(np.array([50, 51, 52], dtype=np.int32))
    runner.submit("text", text)
    outputs, model = runner.run(), reference(directory)
    for name, token_prompt in [
        *((str(number), token_prompt) for number, token_prompt in enumerate(prompts)),
        ("text", text),
    ]:
        output = outputs[name]
        np.testing.assert_allclose(output.logprobs, model.logprobs(token_prompt, output.token_ids), atol=1e-5)


def test_images_change_logprobs() -> None:
    directory = vision_model()
    model = reference(directory)
    ids = np.array([50, 51], dtype=np.int32)
    one, other = (model.logprobs(prompt(directory, [image(64, 40, seed)]), ids) for seed in (1, 2))
    assert np.abs(one - other).max() > 1e-3


@pytest.mark.parametrize("family", ["qwen2_5_vl", "smolvlm"])
def test_prefixes_are_shared_by_equal_images_only(family: str) -> None:
    directory = vision_model(family)
    runner, model = Runner(directory), reference(directory)
    text = tuple(range(40, 60))
    first, second = (prompt(directory, [image(64, 40, seed)], text) for seed in (1, 2))
    np.testing.assert_array_equal(first.token_ids, second.token_ids)
    for name, token_prompt in (("a", first), ("b", second), ("again", first)):
        runner.submit(name, token_prompt)
        runner.run()
    assert runner.outputs["b"].cached_tokens == first.media[0].position >= len(text)
    assert runner.outputs["again"].cached_tokens == len(first.token_ids) - 1
    for name, token_prompt in (("a", first), ("b", second), ("again", first)):
        output = runner.outputs[name]
        np.testing.assert_allclose(output.logprobs, model.logprobs(token_prompt, output.token_ids), atol=1e-5)
    assert runner.engine.refresh_stats().images == 2


def test_a_conversation_goes_on_from_its_cached_images() -> None:
    directory = vision_model()
    runner, model = Runner(directory), reference(directory)
    first = prompt(directory, [image(64, 40, 1)])
    runner.submit("1", first, session_id="s")
    sampled = runner.run()["1"].token_ids
    new = prompt(directory, [image(200, 90, 2)])
    history = np.concatenate([first.token_ids, sampled])
    second = TokenPrompt(
        np.concatenate([history, new.token_ids]),
        (*first.media, *(media.at(media.position + len(history)) for media in new.media)),
    )
    runner.submit("2", second, session_id="s")
    output = runner.run()["2"]
    assert output.cached_tokens == len(history) - 1
    assert runner.engine.refresh_stats().images == 2
    np.testing.assert_allclose(output.logprobs, model.logprobs(second, output.token_ids), atol=1e-5)


def test_other_weights_encode_images_again() -> None:
    directory, other = vision_model(), vision_model(seed=1)
    runner, token_prompt = Runner(directory), prompt(vision_model(), SETS[3])
    runner.submit("before", token_prompt)
    runner.run()
    weights = dict(PolicyWeights(AutoModelForImageTextToText.from_pretrained(other), None).read())
    runner.engine.update_weights(weights, 1)
    runner.submit("after", token_prompt)
    output = runner.run()["after"]
    assert runner.engine.refresh_stats().images == 6
    np.testing.assert_allclose(output.logprobs, reference(other).logprobs(token_prompt, output.token_ids), atol=1e-5)


def test_prompts_with_images_are_scored() -> None:
    directory = vision_model("qwen3_vl")
    runner, token_prompt = Runner(directory), prompt(vision_model("qwen3_vl"), SETS[0])
    runner.submit("scored", token_prompt, scored=True)
    scores = runner.run()["scored"].prompt_logprobs
    assert scores is not None
    cut = TokenPrompt(token_prompt.token_ids[:-3], token_prompt.media)
    np.testing.assert_allclose(scores[-3:], reference(directory).logprobs(cut, token_prompt.token_ids[-3:]), atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f["mm_placeholders"]["image"][0].update(offset=3), "ids from 3 are placeholders"),
        (lambda f: f["mm_placeholders"]["image"][0].update(length=500), "not within the"),
        (lambda f: f["mm_hashes"].update(image=[]), "differ in length"),
        (lambda f: f.update(mm_hashes={"video": ["a"]}), "lists of 'image' only"),
        (lambda f: f["kwargs_data"].update(image=[None]), "is not kept here: send its kwargs_data"),
        (lambda f: f["kwargs_data"].update(image=["gA=="]), "are not those of qwen2_5_vl"),
        (lambda f: f["kwargs_data"].update(image=["%%%"]), "is not the MessagePack of model inputs"),
    ],
)
def test_features_that_do_not_fit_are_refused_before_a_step(change: Any, message: str) -> None:
    directory = vision_model()
    token_prompt = prompt(directory, SETS[1])
    features = MediaEncoder(load_processor(directory)).encode(token_prompt.media)
    change(features)
    model = AutoModelForImageTextToText.from_pretrained(directory)
    with pytest.raises(BadRequest, match=message):
        read_images(features, token_prompt.token_ids, VisionTower(model))


@pytest.mark.parametrize("family", FAMILIES)
def test_foreign_or_broken_image_inputs_are_refused(family: str) -> None:
    tower = VisionTower(AutoModelForImageTextToText.from_pretrained(vision_model(family)))
    other = "smolvlm" if family.startswith("qwen") else "qwen2_5_vl"
    processors = [load_processor(vision_model(name)) for name in (family, other)]
    matching, foreign = (
        dict(processor.features("image", SETS[1][0])) for processor in processors if processor is not None
    )
    assert tower.rows(matching) > 0
    with pytest.raises(FormatError, match="process it with the model's own image processor"):
        tower.rows(foreign)
    for broken in (
        matching["pixel_values"][1:],
        matching["pixel_values"] * np.float32(np.nan),
        matching["pixel_values"][..., 1:],
    ):
        if (
            family in ("smolvlm", "idefics3", "qwen2_5_vl", "qwen3_vl")
            or broken.shape[1:] != matching["pixel_values"].shape[1:]
        ):
            with pytest.raises(FormatError, match="the inputs of an image"):
                tower.rows(matching | {"pixel_values": broken})


async def test_images_over_the_wire(tmp_path: Path) -> None:
    directory = vision_model()
    config = InferenceConfig(max_context=500)
    server = BuiltinReplica(directory, config, name="tiny", log_file=tmp_path / "server.log")
    await server.launch()
    client = HTTPClient([server.url], processor=load_processor(directory))
    blind = HTTPClient([server.url])
    try:
        model = reference(directory)
        unseen = MediaEncoder(load_processor(directory)).encode(prompt(directory, SETS[2]).media)
        assert unseen is not None
        never_sent = unseen["mm_hashes"]["image"]
        for token_prompt in (prompt(directory, SETS[3]), TokenPrompt(np.array([50, 51, 52], dtype=np.int32))):
            completion = await client.generate(token_prompt, PARAMS, session_id="s")
            want = model.logprobs(token_prompt, completion.token_ids)
            np.testing.assert_allclose(completion.logprobs, want, atol=1e-5)
            deltas = [delta async for delta in client.stream(token_prompt, PARAMS, session_id="t")]
            streamed = np.concatenate([delta.token_ids for delta in deltas])
            np.testing.assert_array_equal(streamed, completion.token_ids)
        # A server that has started again keeps nothing: its images are sent again.
        client._stored_media[server.url] = set(never_sent)
        repeated = await client.generate(prompt(directory, SETS[2]), PARAMS, session_id="u")
        assert len(repeated.token_ids) == PARAMS.max_tokens
        with pytest.raises(RequestRefused, match="the model of this client takes text only"):
            await blind.generate(prompt(directory, SETS[0]), PARAMS, session_id="s")
    finally:
        await client.close()
        await blind.close()
        await server.close()


def test_images_kept_by_the_server_are_sent_once() -> None:
    directory = vision_model()
    tower = VisionTower(AutoModelForImageTextToText.from_pretrained(directory))
    encoder, cache = MediaEncoder(load_processor(directory)), features_cache()
    token_prompt = prompt(directory, SETS[3])
    first = encoder.encode(token_prompt.media)
    assert first is not None
    complete = read_images(first, token_prompt.token_ids, tower, cache)
    hashes = first["mm_hashes"]["image"]
    named = encoder.encode(token_prompt.media, set(hashes))
    assert named is not None
    assert named["kwargs_data"]["image"] == [None] * 3
    for one, other in zip(read_images(named, token_prompt.token_ids, tower, cache), complete, strict=True):
        assert one.digest == other.digest
        np.testing.assert_array_equal(one.features["pixel_values"], other.features["pixel_values"])
    with pytest.raises(BadRequest, match="image 0 is not kept here") as refused:
        read_images(named, token_prompt.token_ids, tower, features_cache())
    assert refused.value.field == "features.mm_hashes"


def test_a_hash_that_is_not_of_the_inputs_is_not_kept() -> None:
    directory = vision_model()
    tower = VisionTower(AutoModelForImageTextToText.from_pretrained(directory))
    cache, token_prompt = features_cache(), prompt(directory, SETS[0])
    features = MediaEncoder(load_processor(directory)).encode(token_prompt.media)
    assert features is not None
    features["mm_hashes"]["image"] = ["another"]
    (image_,) = read_images(features, token_prompt.token_ids, tower, cache)
    assert cache.get("another") is None
    assert image_.digest != "another"


def test_kept_features_are_bounded() -> None:
    arrays = [{"pixel_values": np.zeros(100, np.float32)} for _ in range(3)]
    cache = features_cache(room=900)
    for number, features in enumerate(arrays):
        cache.keep(str(number), features)
    assert [cache.get(str(number)) is not None for number in range(3)] == [False, True, True]
