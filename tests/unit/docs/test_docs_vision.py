"""docs/vision.md: the code runs as it stands there, and families and limits are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from support.doc_pages import blocks, section
from support.engine.tiny_vlm import CONVERSATIONS, make_vision_model
from turnwise import images
from turnwise.chat import processor
from turnwise.engine.batching import prompt_images
from turnwise.engine.vision import FAMILIES
from turnwise.trainer.config.policy import PolicyConfig

MODELS = section("vision.md", "Models that see")


def test_code_of_the_page_places_an_image(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = blocks(MODELS, "python")
    make_vision_model(tmp_path, CONVERSATIONS, 0, family="qwen2_5_vl", width=64)
    code = block.replace('"path/to/model"', repr(str(tmp_path)))
    exec(compile(code, "docs/vision.md", "exec"), {"__name__": "docs_vision"})
    printed = capsys.readouterr().out.strip().splitlines()[-1]
    assert f"it prints `{printed}`" in MODELS


def test_families_are_those_that_are_placed_and_loaded() -> None:
    rows = re.findall(r"^\| [^|]* \| ([^|]*) \|", MODELS, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`([a-z]\w*)`", row)} - {"model_type"}
    assert named == set(processor.FAMILIES) == set(FAMILIES)


def test_limits_are_those_of_the_code() -> None:
    assert f"up to {images.MOST_BYTES >> 20} MiB and {processor.MAX_PIXELS >> 20} megapixels" in MODELS
    assert f"{processor.CACHE_BYTES >> 20} MiB of them per process" in MODELS
    serving = section("vision.md", "Serving images")
    assert f"({prompt_images._EMBEDDED_BYTES >> 20} MiB, dropped" in serving
    assert f"by their hash ({prompt_images._KEPT_BYTES >> 30} GiB)" in serving


def test_configuration_of_the_page_is_valid() -> None:
    (block,) = blocks(section("vision.md", "Training on images"), "yaml")
    assert PolicyConfig.model_validate(yaml.safe_load(block)["policies"]["main"]).model.freeze_vision
