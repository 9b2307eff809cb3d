"""What a run leaves of the process that it ran in."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from support.trainer.lookup_run import MODEL, build_model, shared, silent, train_config
from turnwise.errors import ConfigError
from turnwise.trainer.loops.steps import TrainedBatch, roll_out, step_record
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


@pytest.mark.long
def test_a_process_killed_in_step_1_has_evaluated_for_the_next_one_and_sampled_for_it(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    model = shared(tmp_path_factory, "lookup-model", build_model) / MODEL
    plan = {"tasks": "turnwise.envs.basic.lookup:tasks?n=2&split=test", "samples": 1, "greedy": False}
    config = train_config(model, tmp_path, eval=plan)
    out = io.StringIO()

    async def sampled_per_second(evaluated: bool) -> float:
        async with open_run(config, tmp_path / "run", Console(file=out, width=300)) as run:
            assert run.resume_first_eval() == evaluated
            if not evaluated:
                await run.evaluate("step-0")
            before, other = run.last_eval, {"eval": config.eval.model_copy(update={"samples": 2})}
            run.config = config.model_copy(update=other)
            assert not run.resume_first_eval()
            assert before is not None
            batch = await roll_out(run)
            return step_record(run, [TrainedBatch(batch, {}, {}, 0.0, 0.0)], 0.0)["time/sampled_tokens_per_s"]

    assert asyncio.run(sampled_per_second(evaluated=False)) > 0
    shown = out.getvalue()
    assert "run step-0: evaluating 2 tasks\n" in shown
    assert re.search(
        r"^run step-0: sampled success \d\.\d{3} ± \d\.\d{3}, reward \d\.\d{3} ± \d\.\d{3}$", shown, re.MULTILINE
    )
    # Its groups are read from disk: this process sampled none of them.
    assert asyncio.run(sampled_per_second(evaluated=True)) == 0


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
