"""Tiny vision-language models made in place, prompts with images, and transformers' own code to compare with."""

from __future__ import annotations

import atexit
import functools
import io
import json
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from turnwise.chat.processor import load_processor
from turnwise.engine.batching.batch_state import Generation, Output
from turnwise.engine.batching.prompt_images import read_images
from turnwise.engine.causal_lm import CausalLM
from turnwise.engine.engine import Engine
from turnwise.model.media_wire import MediaEncoder
from turnwise.types import Media, SamplingParams, TokenPrompt

SMALL_MODEL = Path(__file__).parents[3] / "examples" / "small_model"
if str(SMALL_MODEL) not in sys.path:
    sys.path.append(str(SMALL_MODEL))
from small_vision import make_vision_model  # noqa: E402 - a file of the examples, which are no package

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "smolvlm", "idefics3", "internvl")
SIZES = ((20, 20), (64, 40), (200, 90))
"""Width and height of a small, a middle and a large image: the last is scaled down by each tiny model."""

_PART = {"type": "image"}
_SEEN = [_PART, {"type": "text", "text": "What is it? red green blue"}]
CONVERSATIONS = [
    {
        "messages": [
            {"role": "system", "content": "You see."},
            {"role": "user", "content": _SEEN},
            {"role": "assistant", "content": f"It is {colour}."},
        ],
        "tools": [],
    }
    for colour in ("red", "green", "blue")
]


def image(width: int, height: int, seed: int = 0, kind: str = "PNG", mode: str = "RGB") -> bytes:
    """Return an encoded image of random pixels, smooth enough that scaling it keeps something."""
    pixels = np.random.default_rng(seed).integers(0, 255, (height // 4 + 1, width // 4 + 1, len(mode)), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels, mode).resize((width, height)).save(buffer, kind)
    return buffer.getvalue()


@functools.cache
def _root() -> Path:
    root = Path(tempfile.mkdtemp(prefix="turnwise-vision-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root


@functools.cache
def vision_model(family: str = "qwen2_5_vl", seed: int = 0) -> Path:
    """Return the directory of a tiny model, which is made once per process. Tests must not change it."""
    directory = _root() / f"{family}-{seed}"
    make_vision_model(
        directory, CONVERSATIONS, seed, family=family, width=64, most_patches=64 if family.startswith("qwen") else 16
    )
    return directory


def transformers_processor(directory: Path) -> Any:
    """Return the processor of transformers for a model, without its part for videos, which needs torchvision."""
    import transformers
    from transformers import AutoImageProcessor, AutoTokenizer, ProcessorMixin
    from transformers.models.smolvlm import processing_smolvlm

    settings = json.loads((directory / "processor_config.json").read_text())
    name = settings.pop("processor_class")
    videos = {"video_processor": None} if name == "SmolVLMProcessor" else {}
    tokenizer = AutoTokenizer.from_pretrained(directory)
    images = AutoImageProcessor.from_pretrained(directory, backend="pil")
    with (
        mock.patch.object(ProcessorMixin, "check_argument_for_proper_class", return_value=None),
        mock.patch.object(processing_smolvlm, "num2words", str),
    ):
        return getattr(transformers, name)(image_processor=images, tokenizer=tokenizer, **videos, **settings)


PARAMS = SamplingParams(max_tokens=6, ignore_eos=True, seed=1)
SETS = [[image(*size, seed)] for seed, size in enumerate(SIZES)] + [
    [image(*size, 5 + n) for n, size in enumerate(SIZES)]
]
"""One image of each size, and one of each in a prompt."""


def prompt(directory: Path, images: list[bytes], text: tuple[int, ...] = (50, 51, 52, 53)) -> TokenPrompt:
    """Return a prompt with some text before each image, and after the last one."""
    processor = load_processor(directory)
    assert processor is not None
    ids: list[int] = []
    media = []
    for data in images:
        placed = processor.place("image", data)
        ids += text
        media.append(Media("image", data, len(ids) + placed.offset, placed.length))
        ids += placed.ids.tolist()
    return TokenPrompt(np.array([*ids, 60, 61, 62], dtype=np.int32), tuple(media))


@dataclass
class Reference:
    """A model in transformers' own code."""

    directory: Path
    model: Any

    def logprobs(self, prompt: TokenPrompt, completion: np.ndarray) -> np.ndarray:
        """Return the log-probabilities of a completion's ids."""
        processor = load_processor(self.directory)
        assert processor is not None
        ids = torch.from_numpy(np.concatenate([prompt.token_ids, completion])).long()[None]
        arguments: dict[str, torch.Tensor] = {}
        if prompt.media:
            features = [processor.features("image", media.data) for media in prompt.media]
            for name in features[0].keys() - {"num_patches"}:
                join = np.stack if name == "image_grid_thw" else np.concatenate
                arguments[name] = torch.from_numpy(join([image[name] for image in features]))
            if "pixel_attention_mask" in arguments:
                arguments = {name: value[None] for name, value in arguments.items()}
            if "image_grid_thw" in arguments:
                arguments["mm_token_type_ids"] = (ids == self.model.config.image_token_id).int()
        with torch.no_grad():
            logprobs = self.model(input_ids=ids, **arguments).logits[0, len(prompt.token_ids) - 1 : -1].log_softmax(-1)
        return logprobs.gather(1, torch.from_numpy(completion).long()[:, None])[:, 0].numpy()


def reference(directory: Path) -> Reference:
    """Return the reference of a directory."""
    return Reference(directory, AutoModelForImageTextToText.from_pretrained(directory).eval())


class Runner:
    """An engine stepped by hand."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        self.directory = directory
        self.outputs: dict[str, Output] = {}
        self.model = CausalLM(directory)
        self.engine = Engine(self.model, self._take, **settings)

    def _take(self, outputs: list[Output]) -> None:
        self.outputs |= {output.id: output for output in outputs}

    def generate(self, prompt: TokenPrompt, params: SamplingParams = PARAMS) -> Output:
        """Return the output of one request."""
        self.submit("only", prompt, params)
        return self.run()["only"]

    def submit(self, name: str, prompt: TokenPrompt, params: SamplingParams = PARAMS, **settings: Any) -> None:
        """Queue a request; images go through their form on the wire."""
        features = MediaEncoder(load_processor(self.directory)).encode(prompt.media)
        images = read_images(features, prompt.token_ids, self.model.vision)
        self.engine.submit(Generation(id=name, prompt=prompt.token_ids, params=params, images=images, **settings))

    def run(self) -> dict[str, Output]:
        """Step until nothing is left; return the outputs by name."""
        while self.engine.step():
            pass
        return self.outputs
