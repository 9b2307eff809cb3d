"""The registry of inference engines, and what a set of replicas asks of one that is not ours."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from turnwise.errors import ConfigError, EngineDied, InferenceError, RegistryError
from turnwise.inference.builtin import BuiltinReplica
from turnwise.inference.config import InferenceConfig
from turnwise.inference.engines import (
    ENGINES,
    check_engine,
    emulates_bfloat16,
    find_engine,
    make_replica,
    register_inference_engine,
    serve_replica,
)
from turnwise.inference.replica_set import ReplicaSet
from turnwise.inference.vllm import VLLMReplica
from turnwise.model.core import Replica, WeightManifest


class OwnEngine(Replica):
    """The least that an engine has: no counters."""

    instances: ClassVar[list[OwnEngine]] = []
    launched = asyncio.Event()

    @classmethod
    async def check(cls, model: Path, config: InferenceConfig) -> list[str]:
        if config.custom.get("color") != "red":
            raise ConfigError(f"inference.custom.color is {config.custom.get('color')!r}: say red")
        return [f"{model} is served in red"]

    def __init__(
        self,
        model: Path,
        config: InferenceConfig,
        *,
        name: str | None,
        weight_version: int,
        log_file: Path,
        number: int,
        url: str | None,
    ) -> None:
        self.given = (model, config.custom, name, weight_version, log_file, number, url)
        self.number = number
        self.events: list[str] = []
        self.instances.append(self)
        self._died = asyncio.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.number + 1}"

    async def launch(self) -> None:
        self.events.append("launch")
        self.launched.set()

    async def prepare_updates(self, announced: Sequence[WeightManifest]) -> None:
        self.events.append(f"prepare {len(announced)}")

    async def wait_died(self) -> EngineDied:
        await self._died.wait()
        return EngineDied("it died")

    async def restart(self) -> None:
        self.events.append("restart")
        self._died.clear()

    async def health(self) -> bool:
        return not self._died.is_set()

    async def pause(self, *, abort: bool = False) -> None:
        self.events.append(f"pause {abort}")

    async def resume(self) -> None:
        self.events.append("resume")

    async def abort(self) -> int:
        return 0

    async def update_weights(self, manifest: WeightManifest) -> int:
        return manifest.version

    async def close(self) -> None:
        self.events.append("close")

    def die(self) -> None:
        self._died.set()


@pytest.fixture(autouse=True)
def no_instances() -> None:
    OwnEngine.instances = []
    OwnEngine.launched = asyncio.Event()


def own(**changes: Any) -> InferenceConfig:
    keys = {"engine": f"{__name__}:OwnEngine", "custom": {"color": "red"}, **changes}
    return InferenceConfig.model_validate(keys)


async def test_a_set_of_replicas_of_an_engine_by_reference(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    fleet = ReplicaSet(own(replicas=2), Path("model"), logs=tmp_path)
    with caplog.at_level(logging.WARNING):
        await fleet.launch(updates=())
    try:
        assert "model is served in red" in caplog.text
        assert [engine.given for engine in OwnEngine.instances] == [
            (Path("model"), {"color": "red"}, None, 0, tmp_path / f"server-{number}.log", number, None)
            for number in range(2)
        ]
        await fleet.pause()
        await fleet.resume()
        OwnEngine.instances[1].die()
        await fleet.recover(InferenceError("a request failed"))
        assert await fleet.stats() == {"restarts": 1.0, "ejections": 1.0, "resumed_tokens": 0.0}
    finally:
        await fleet.close()
    first = ["launch", "prepare 0", "pause True", "resume", "close"]
    assert OwnEngine.instances[0].events == first
    assert OwnEngine.instances[1].events == [*first[:-1], "restart", "close"]


async def test_configured_urls_replace_launched_servers(tmp_path: Path) -> None:
    fleet = ReplicaSet(own(url="http://a:1/, http://b:2"), Path("model"), logs=tmp_path)
    assert [engine.given[-1] for engine in OwnEngine.instances] == ["http://a:1", "http://b:2"]
    await fleet.launch()
    # Nothing updates them here.
    assert [engine.events for engine in OwnEngine.instances] == [["launch"], ["launch"]]
    await fleet.close()


async def test_engine_check_fails_before_the_start(tmp_path: Path) -> None:
    fleet = ReplicaSet(own(custom={}), Path("model"), logs=tmp_path)
    with pytest.raises(ConfigError, match=r"inference\.custom\.color is None: say red"):
        await fleet.launch()
    assert OwnEngine.instances[0].events == []


async def test_serving_ends_with_the_server(tmp_path: Path) -> None:
    serving = asyncio.create_task(serve_replica(Path("model"), own(), name="m", log_file=tmp_path / "log"))
    await OwnEngine.launched.wait()
    assert OwnEngine.instances[0].given[2] == "m"
    OwnEngine.instances[0].die()
    with pytest.raises(EngineDied):
        await serving
    assert OwnEngine.instances[0].events == ["launch", "close"]
    with pytest.raises(ConfigError, match="url is http://a:1, which serves already"):
        await serve_replica(Path("model"), own(url="http://a:1"), name=None, log_file=tmp_path / "log")


def test_engines_by_name() -> None:
    assert find_engine("builtin") is BuiltinReplica
    assert find_engine("vllm") is VLLMReplica
    with pytest.raises(ConfigError, match=r"inference.engine is 'vlm'; did you mean 'vllm'\? Known: .*builtin, .*vllm"):
        find_engine("vlm")
    with pytest.raises(ConfigError, match="not a Replica"):
        find_engine("pathlib:Path")
    with pytest.raises(ConfigError, match="no module named"):
        find_engine("nowhere.at_all:Engine")


def test_engines_are_registered_once() -> None:
    try:
        assert register_inference_engine("red")(OwnEngine) is OwnEngine
        assert find_engine("red") is OwnEngine
        assert register_inference_engine("red")(OwnEngine) is OwnEngine
        with pytest.raises(RegistryError, match="'red' is taken"):
            register_inference_engine("red")(BuiltinReplica)
        with pytest.raises(RegistryError, match=r"must derive from turnwise\.model\.core\.Replica"):
            register_inference_engine("blue")(Path)  # type: ignore[type-var]
    finally:
        ENGINES.pop("red", None)


def test_a_class_that_takes_other_arguments_is_named(tmp_path: Path) -> None:
    class Other(OwnEngine):
        def __init__(self) -> None: ...

    ENGINES["other"] = Other
    try:
        with pytest.raises(
            ConfigError, match=r"'other', whose class cannot be constructed: .*; it takes the arguments"
        ):
            make_replica("model", own(engine="other"), log_file=tmp_path / "log")
    finally:
        del ENGINES["other"]


@pytest.mark.parametrize(
    ("text", "emulated"),
    [
        ("processor: 0\nflags\t\t: fpu avx2 avx512f\n", True),
        ("processor: 0\nflags\t\t: fpu avx2 avx512_bf16\n", False),
        ("processor: 0\nflags\t\t: fpu amx_tile amx_bf16\n", False),
        ("processor: 0\nFeatures\t: fp asimd bf16\n", False),
        ("processor: 0\nFeatures\t: fp asimd\n", True),
        ("hello", False),
    ],
)
def test_a_processor_without_instructions_for_a_dtype_is_told(text: str, emulated: bool, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    assert emulates_bfloat16(tmp_path / "cpuinfo") is emulated
    assert not emulates_bfloat16(tmp_path / "none")


async def test_built_in_engine_refuses_float16() -> None:
    with pytest.raises(ConfigError, match=r"inference.dtype is float16.*say bfloat16"):
        await check_engine(Path("model"), InferenceConfig(dtype="float16"))


async def test_a_section_for_other_engines_is_refused_by_ours() -> None:
    with pytest.raises(ConfigError, match=r"inference.custom is {'a': 1}.*inference.engine is builtin: remove it"):
        await check_engine(Path("model"), InferenceConfig(custom={"a": 1}))
