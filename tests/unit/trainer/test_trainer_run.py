"""What a run leaves of the process that it ran in."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
from pathlib import Path

import pytest

from support.trainer.lookup_run import MODEL, build_model, shared, silent, train_config
from turnwise.errors import ConfigError
from turnwise.trainer.run.checkpoint import CheckpointStore
from turnwise.trainer.run.run import open_run


@pytest.mark.long
@pytest.mark.usefixtures("python_s_own_collections")
def test_garbage_collections_skip_loaded_objects_while_a_run_is_open(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    config = train_config(shared(tmp_path_factory, "lookup-model", build_model) / MODEL, tmp_path)

    async def open_and_close() -> int:
        async with open_run(config, tmp_path / "run", silent()):
            return gc.get_freeze_count()

    assert gc.get_freeze_count() == 0
    assert asyncio.run(open_and_close()) > 100_000
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize("torn", [False, True])
def test_a_checkpoint_has_the_groups_in_flight_and_never_weights_of_no_step(
    torn: bool, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    config = train_config(shared(tmp_path_factory, "lookup-model", build_model) / MODEL, tmp_path)

    async def end_in_an_update() -> None:
        async with open_run(config, tmp_path / "run", silent()) as run:
            run.scheduler.top_up(2)
            run.advance()
            with contextlib.suppress(ZeroDivisionError), run.updating() as changing:
                if torn:
                    changing()
                raise ZeroDivisionError

    asyncio.run(end_in_an_update())
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    assert store.steps() == ([] if torn else [1])
    if not torn:
        state = json.loads((store.path(1) / "trainer_state.json").read_text())
        assert len({group["task"]["id"] for group in state["feed"]}) == 2


def test_context_shorter_than_the_prompts_is_refused_at_the_start(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    config = train_config(shared(tmp_path_factory, "lookup-model", build_model) / MODEL, tmp_path)
    rollout = config.rollout.model_copy(update={"context_length": 20})

    async def begin() -> None:
        async with open_run(config.model_copy(update={"rollout": rollout}), tmp_path / "run", silent()):
            pytest.fail("the run began")

    with pytest.raises(ConfigError, match=r"rollout.context_length: the first prompt of task .* the context has 20"):
        asyncio.run(begin())
