"""Addresses of a form of one's own: behind a proxy, with rollout and attempt in the path, kept apart and balanced."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
from aiohttp import web

from support.chat.model_dirs import renderer_for
from turnwise.agents.core import Agent, Episode
from turnwise.config import load_config
from turnwise.errors import ConfigError, InferenceError
from turnwise.gateway.endpoints import EndpointTemplate, Place, check_template
from turnwise.inference.scripted import ScriptedClient
from turnwise.rollout import EpisodeRunner, EpisodeSpec, RolloutConfig
from turnwise.tasks import Task

FORM = "{base}/rollout/{rollout_id}/attempt/{attempt_id}/{token}"


async def ask(url: str) -> tuple[int, dict[str, Any]]:
    body = {"model": "any", "messages": [{"role": "user", "content": "Hello"}]}
    async with aiohttp.ClientSession() as http, http.post(f"{url}/v1/chat/completions", json=body) as answer:
        return answer.status, await answer.json()


@asynccontextmanager
async def runner(**rollout: Any) -> AsyncIterator[EpisodeRunner]:
    renderer = renderer_for("qwen3")
    section = {"env": {"name": "lookup"}, "agent": {"name": f"{__name__}:Asks"}, **rollout}
    config = load_config(RolloutConfig, defaults=section)
    episode_runner = EpisodeRunner(
        config, ScriptedClient(renderer, lambda request: "done"), renderer, context_length=5000
    )
    try:
        async with asyncio.timeout(60):
            yield episode_runner
    finally:
        await episode_runner.close()


SEEN: list[str] = []
ANSWERED: list[int] = []


class Asks(Agent):
    """Asks at its address, and notes it."""

    async def run(self, episode: Episode) -> None:
        url = await episode.address()
        SEEN.append(url)
        status, _ = await ask(url)
        ANSWERED.append(status)


class Meets(Asks):
    """Waits for the other one, then asks at addresses put together from both."""

    async def run(self, episode: Episode) -> None:
        SEEN.append(await episode.address())
        if len(SEEN) == 2:
            MET.set()
        await MET.wait()
        if SEEN[0] == await episode.address():
            first_path, other = (urlsplit(url).path.split("/") for url in SEEN)
            origin = SEEN[0].partition("/rollout")[0]
            for path in ([*other[:-1], first_path[-1]], first_path[-3:], [first_path[-1]]):
                status, _ = await ask("/".join([origin, *[part for part in path if part]]))
                ANSWERED.append(status)
            DONE.set()
        await DONE.wait()


MET, DONE = asyncio.Event(), asyncio.Event()


@pytest.fixture(autouse=True)
def _empty() -> None:
    SEEN.clear()
    ANSWERED.clear()
    MET.clear()
    DONE.clear()


def spec(task: str = "a task/with: signs", member: int = 0, attempt: int = 0) -> EpisodeSpec:
    return EpisodeSpec(Task(task, "go"), f"0-train-{task}", member=member, attempt=attempt)


async def test_rollout_and_attempt_stand_in_the_path_and_attempts_are_kept_apart() -> None:
    async with runner(address=FORM) as episode_runner:
        outcome = await episode_runner.run(spec(member=3))
        await episode_runner.run(spec(member=3, attempt=1))
        late, _ = await ask(SEEN[0])
    assert ANSWERED == [200, 200]
    assert len(outcome.trajectories[0].segments) == 2
    first, second = (urlsplit(url).path.rpartition("/")[0] for url in SEEN)
    assert first == "/rollout/0-train-a%20task%2Fwith%3A%20signs%2F3/attempt/0"
    assert second == first[:-1] + "1"
    assert late == 404, "the address of an attempt that has ended"


async def test_addresses_with_parts_of_another_session_are_refused() -> None:
    async with runner(address=FORM, agent={"name": f"{__name__}:Meets"}) as episode_runner:
        await asyncio.gather(episode_runner.run(spec("one")), episode_runner.run(spec("two")))
    # Of another rollout with this token; what a proxy took the front of; all of it.
    assert ANSWERED == [404, 200, 200]


async def test_requests_through_a_public_url_reach_the_session() -> None:
    paths: list[str] = []

    async def forward(request: web.Request) -> web.Response:
        paths.append(request.path)
        rest = str(request.rel_url.raw_path).removeprefix("/team-a")
        url = f"http://127.0.0.1:{episode_runner.gateway.port}{rest}"
        async with aiohttp.ClientSession() as http, http.post(url, data=await request.read()) as answer:
            return web.Response(status=answer.status, body=await answer.read(), content_type="application/json")

    proxy = web.Application()
    proxy.router.add_route("*", "/{rest:.*}", forward)
    served = web.AppRunner(proxy)
    await served.setup()
    site = web.TCPSite(served, "127.0.0.1", 0)
    await site.start()
    port = served.addresses[0][1]
    try:
        async with runner(
            address=FORM, gateway={"public_urls": [f"http://127.0.0.1:{port}/team-a/"]}
        ) as episode_runner:
            await episode_runner.run(spec())
    finally:
        await served.cleanup()
    assert ANSWERED == [200]
    assert paths[0].startswith("/team-a/rollout/")


def test_each_episode_gets_the_least_used_public_url() -> None:
    form = EndpointTemplate("{base}/{token}", ["http://a/", "http://b"])
    assert [form.take() for _ in range(3)] == ["http://a", "http://b", "http://a"]
    form.release("http://a")
    form.release("http://a")
    assert [form.take() for _ in range(3)] == ["http://a", "http://a", "http://b"]
    assert EndpointTemplate().take() is None


def test_the_hosts_of_public_addresses_may_be_requested() -> None:
    assert EndpointTemplate("{base}/{token}", ["http://a/", "https://[fd00::1]:8/x"]).hosts == ["a", "fd00::1"]
    assert EndpointTemplate("http://{session}.agents.example:{port}/{token}").hosts == ["*.agents.example"]
    assert EndpointTemplate().hosts == EndpointTemplate("http://{host}:{port}/{token}").hosts == []


def test_all_fields_of_an_address() -> None:
    form = EndpointTemplate("http://{host}:{port}/r/{rollout_id}/{attempt_id}/{session}/{token}/x")
    url = form.url(Place("g/1", "0", "solver/2"), "tok", host="[::1]", port=8)
    assert url == "http://[::1]:8/r/g%2F1/0/solver%2F2/tok/x"
    assert form.prefix(Place("g/1", "0", "solver/2"), "tok") == ("r", "g", "1", "0", "solver", "2")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{base}/rollout/{rollout_id}", "must contain /{token} once"),
        ("{base}/{token}/{token}", "must contain /{token} once"),
        ("{base}/s-{token}", "must contain /{token} once"),
        ("{base}/{rollout}/{token}", "{rollout} in '{base}/{rollout}/{token}' is not a field of an address; fields:"),
        ("{host}/{token}", "begin it with {base}, http:// or https://"),
        ("{base}/x?key=1/{token}", "'?'"),
        ("{base}/{}/{token}", "{} in"),
    ],
)
def test_malformed_address_templates_are_refused(template: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_template(template)
    assert message in str(error.value)
    with pytest.raises(ConfigError, match="address"):
        load_config(RolloutConfig, defaults={"env": {"name": "lookup"}, "address": template})


@pytest.mark.parametrize(
    ("gateway", "message"),
    [
        ({"public_urls": ["proxy:80"]}, "'proxy:80' is not a base URL"),
        ({"public_urls": ["http://proxy:port"]}, "'http://proxy:port' is not a base URL"),
        ({"public_urls": ["http://proxy/?a=1"]}, "is not a base URL"),
        ({"port": 70000}, "at most 65535"),
        ({"ports": 1}, "did you mean"),
    ],
)
def test_a_malformed_gateway_section_is_refused(gateway: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match="gateway") as error:
        load_config(RolloutConfig, defaults={"env": {"name": "lookup"}, "gateway": gateway})
    assert message in str(error.value)


def test_public_urls_that_no_address_holds_are_refused() -> None:
    section = {
        "env": {"name": "lookup"}, "address": "http://{host}:{port}/{token}", "gateway": {"public_urls": ["http://a"]},
    }  # fmt: skip
    with pytest.raises(ConfigError, match=r"only together with \{base\} in address"):
        load_config(RolloutConfig, defaults=section)


async def test_a_port_that_is_taken_is_named() -> None:
    async with runner() as first:
        await first.gateway.start()
        async with runner(gateway={"port": first.gateway.port}) as second:
            outcome = await second.run(spec())
    assert isinstance(outcome.error, InferenceError)
    assert "cannot be bound" in str(outcome.error)
