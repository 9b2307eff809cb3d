"""Routed experts in the recorder: they stand beside the tokens that they predicted, in every turn, branch and file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from support.chat.toy_renderer import ToyRenderer
from turnwise.inference.scripted import ScriptedClient, ScriptedRequest, scripted_logprobs
from turnwise.recorder.session import Session, SessionLimits
from turnwise.recorder.token_session import TokenSession
from turnwise.trajectory import Trajectory, path_routes, to_samples
from turnwise.trajectory_file import TrajectoryFile, TrajectoryWriter
from turnwise.types import Completion, Message, Routes, RouteShape, decode_routes, encode_routes, recorded

SHAPE = RouteShape(layers=3, experts=64, chosen=2)


def routes_of(token_ids: np.ndarray) -> Routes:
    """Return made-up routes by position and id, so that a shift shows."""
    mixed = (np.arange(len(token_ids)) * 7 + token_ids)[:, None, None] + np.arange(6).reshape(3, 2) * 5
    return (mixed % 64).astype(np.uint8)


def routed(request: ScriptedRequest) -> Completion:
    completion = request.renderer.completion({"role": "assistant", "content": f"turn {request.number}"}, ())
    token_ids = np.concatenate([request.prompt, completion])
    start = max(1, request.params.routes_from or 0)
    versions = ((0, 0, len(completion)),)
    return Completion(completion, scripted_logprobs(completion), "stop", versions, routes_of(token_ids)[start:])


def open_session(kind: type[Session] = Session, script=routed) -> Session:
    renderer = ToyRenderer()
    return kind(ScriptedClient(renderer, script), renderer, id="s", limits=SessionLimits(context_length=10_000))


def trajectory_of(session: Session) -> Trajectory:
    return Trajectory("s", "e", "g", "t", segments=session.segments())


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def check_path(trajectory: Trajectory, leaf: int) -> None:
    path = trajectory.path(leaf)
    token_ids = np.concatenate([segment.token_ids for segment in path])
    routes = path_routes(path)
    assert routes is not None
    assert np.flatnonzero(~recorded(routes)).tolist() == [0]
    assert np.array_equal(routes[1:], routes_of(token_ids)[1:])


async def test_each_token_of_each_branch_has_its_routes() -> None:
    session = open_session()
    first = await session.chat([user("a")])
    await session.chat([user("a"), first, user("b")])
    await session.chat([user("a"), first, user("other")])
    await session.chat([user("a")])
    async for _ in session.stream([user("a"), first, user("streamed")]):
        pass
    trajectory = trajectory_of(session)
    assert len(trajectory.leaves()) == 4
    for leaf in trajectory.leaves():
        check_path(trajectory, leaf)


async def test_requests_of_ids_ask_for_the_routes_of_new_ids_alone() -> None:
    session = open_session(TokenSession)
    assert isinstance(session, TokenSession)
    turn = await session.generate([5, 6, 7])
    await session.generate([5, 6, 7, *turn.completion.token_ids.tolist(), 9])
    client = session._client
    assert isinstance(client, ScriptedClient)
    assert [request.params.routes_from for request in client.requests] == [0, 3 + len(turn.completion.token_ids)]
    trajectory = trajectory_of(session)
    check_path(trajectory, trajectory.leaves()[0])


async def test_turn_of_a_server_without_routes_is_marked_as_not_recorded() -> None:
    def unrouted_at_first(request: ScriptedRequest) -> Completion:
        completion = routed(request)
        return completion if request.number else replace(completion, routed_experts=None)

    session = open_session(script=unrouted_at_first)
    first = await session.chat([user("a")])
    await session.chat([user("a"), first, user("b")])
    [sample] = to_samples(trajectory_of(session), reported=True).rows
    assert sample.routes is not None
    unrouted = sum(len(segment.token_ids) for segment in session.segments()[:2])
    assert recorded(sample.routes).tolist() == [False] * unrouted + [True] * (len(sample.input_ids) - unrouted)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
async def test_files_and_records_keep_routes(tmp_path: Path, dtype: type[np.generic]) -> None:
    session = open_session()
    first = await session.chat([user("a")])
    await session.chat([user("a"), first, user("b")])
    original = trajectory_of(session)
    original.segments = [
        replace(segment, routes=None if segment.routes is None else segment.routes.astype(dtype))
        for segment in original.segments
    ]
    original.segments[0] = replace(original.segments[0], routes=None)
    writer = TrajectoryWriter(tmp_path / "t.twz")
    location = writer.write(original)
    for read in (writer.read(location), Trajectory.from_bytes(original.to_bytes())):
        for segment, expected in zip(read.segments, original.segments, strict=True):
            assert (segment.routes is None) == (expected.routes is None)
            if expected.routes is not None and segment.routes is not None:
                assert segment.routes.dtype == dtype
                assert np.array_equal(segment.routes, expected.routes)
    writer.close()
    with TrajectoryFile(tmp_path / "t.twz") as file:
        assert file.read(file.entries[0]).to_bytes() == original.to_bytes()


def test_routes_travel_as_vllm_sends_them() -> None:
    routes = routes_of(np.arange(5))
    assert np.array_equal(decode_routes(encode_routes(routes)), routes)
    for text, problem in ((None, "no .npy"), ("!", "no .npy"), (encode_routes(routes.astype(np.int64)), "int64")):
        with pytest.raises(ValueError, match=problem):
            decode_routes(text)


def test_routes_of_another_model_are_told_by_their_numbers() -> None:
    routes = routes_of(np.arange(5))
    assert SHAPE.mismatch(routes) is None
    assert RouteShape(4, 64, 2).mismatch(routes) == "3 layers with 2 experts a token, not 4 with 2"
    assert RouteShape(3, 8, 2).mismatch(routes) == f"expert {routes.max()}, where each layer has 8"


@pytest.mark.parametrize(
    ("settings", "shape"),
    [
        ({"num_hidden_layers": 48, "num_experts": 128, "num_experts_per_tok": 8}, RouteShape(48, 128, 8)),
        ({"num_hidden_layers": 3, "n_routed_experts": 256, "num_experts_per_tok": 8}, RouteShape(3, 256, 8)),
        ({"num_hidden_layers": 3, "moe_num_experts": 512, "moe_k": 6}, RouteShape(3, 512, 6)),
        ({"num_hidden_layers": 3, "num_experts": 16, "moe_topk": [1, 2, 1]}, None),
        ({"num_hidden_layers": 3, "hidden_size": 8}, None),
    ],
)
def test_shape_is_read_from_the_names_of_families(settings: dict[str, int], shape: RouteShape | None) -> None:
    assert RouteShape.of(settings) == shape
    assert shape is None or shape.dtype == (np.uint16 if shape.experts == 512 else np.uint8)
