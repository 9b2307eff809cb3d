"""MLflow."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any

from turnwise.errors import MissingExtraError
from turnwise.trainer.observe.loggers.core import LoggedRun, Logger

_ID = "turnwise.run_id"
# What MLflow takes at once, and of one parameter.
_PARAMETERS_AT_ONCE, _LONGEST_PARAMETER = 100, 500
_METRICS_AT_ONCE = 1000


class MLflowLogger(Logger):
    """Logs to a tracking server, a database or, by default, a database in the run's directory.

    Args:
        run: What is logged.
        experiment: The experiment; made where it is missing.
        tracking_uri: Where to (``http://...``, ``sqlite:///path``); None is what ``MLFLOW_TRACKING_URI`` says, else
            ``mlflow.db`` in the run's directory.
    """

    def __init__(self, run: LoggedRun, *, experiment: str = "turnwise", tracking_uri: str | None = None) -> None:
        self._mlflow = _package()
        given = tracking_uri or self._mlflow.environment_variables.MLFLOW_TRACKING_URI.get()
        uri = given or f"sqlite:///{(run.directory / 'mlflow.db').resolve()}"
        self._client: Any = self._mlflow.MlflowClient(tracking_uri=uri)
        found = self._client.get_experiment_by_name(experiment)
        number = self._client.create_experiment(experiment) if found is None else found.experiment_id
        earlier = self._client.search_runs([number], filter_string=f"tags.`{_ID}` = '{run.id}'", max_results=1)
        if earlier:
            self._id: str = earlier[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return
        self._id = self._client.create_run(number, run_name=run.name, tags={_ID: run.id}).info.run_id
        entities = self._mlflow.entities
        parameters = [
            entities.Param(_name(key), value[:_LONGEST_PARAMETER]) for key, value in run.settings().items() if value
        ]
        for start in range(0, len(parameters), _PARAMETERS_AT_ONCE):
            self._client.log_batch(self._id, params=parameters[start : start + _PARAMETERS_AT_ONCE])

    @classmethod
    def check(cls) -> None:
        """See that MLflow is installed. Raises MissingExtraError."""
        _package()

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Log the figures of a step."""
        now = int(time.time() * 1000)
        metrics = [self._mlflow.entities.Metric(_name(name), value, now, step) for name, value in figures.items()]
        for start in range(0, len(metrics), _METRICS_AT_ONCE):
            self._client.log_batch(self._id, metrics=metrics[start : start + _METRICS_AT_ONCE])

    def close(self) -> None:
        """Say that the run has ended."""
        self._client.set_terminated(self._id)


def _name(name: str) -> str:
    """Return a name as MLflow takes it: some marks (``pass@4``) are not allowed there."""
    return re.sub(r"[^\w\-. :/]", "_", name)


def _package() -> Any:
    try:
        import mlflow
        import sqlalchemy  # noqa: F401 - the default store needs it, and not every mlflow brings it along
    except ImportError as error:
        raise MissingExtraError("mlflow", "mlflow", "the logger mlflow") from error
    return mlflow
