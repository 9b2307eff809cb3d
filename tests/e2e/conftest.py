"""What the tests of whole runs share."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.trainer.lookup_run import MODEL, build_model, shared, warm_start

# Files of long and real tests, the one that takes longest first: with two workers, what begins last decides when all
# has ended.
LONGEST = (
    "test_smollm2_job", "test_ray", "test_main_job", "test_code_repair_job", "test_blackbox_job", "test_calculator_job",
    "test_langgraph_job", "test_long_task", "test_e2e_distill", "test_e2e_crash_victims", "test_e2e_manager",
    "test_e2e_custom_agents", "test_credit_example", "test_lora_job", "test_mixture_job", "test_algorithm_examples",
    "test_e2e_random_kills",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest tests."""

    def place(item: pytest.Item) -> int:
        stem, names = item.path.stem, {mark.name for mark in item.iter_markers()}
        return LONGEST.index(stem) if stem in LONGEST and names & {"long", "real"} else len(LONGEST)

    items.sort(key=place)


@pytest.fixture(scope="session")
def lookup_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model that writes calls and answers; one for all workers."""
    return shared(tmp_path_factory, "lookup-model", build_model) / MODEL


@pytest.fixture(scope="session")
def warm_lookup(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The warm start of the main job at seed 0, with which the jobs begin that differ in what comes after it."""
    return shared(tmp_path_factory, "warm-lookup", warm_start)
