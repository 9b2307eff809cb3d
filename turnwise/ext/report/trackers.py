"""Loggers of the known tracking services: TensorBoard, Weights & Biases, trackio and MLflow."""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from turnwise.append_file import private_directory
from turnwise.errors import MissingExtraError
from turnwise.trainer.observe.loggers import LoggedRun, Logger


class PackageLogger(Logger):
    """A logger that uses an optional package, which the extra of the same name installs.

    Attributes:
        extra: The extra.
        modules: The modules that are needed; the first is the one that is called.
    """

    extra: ClassVar[str]
    modules: ClassVar[tuple[str, ...]]

    @classmethod
    def check(cls) -> None:
        """Check that the package is installed. Raises MissingExtraError."""
        cls.load_package()

    @classmethod
    def load_package(cls) -> Any:
        """Return the package's module. Raises MissingExtraError."""
        try:
            package, *_ = [importlib.import_module(module) for module in cls.modules]
        except ImportError as error:
            raise MissingExtraError(cls.extra, cls.extra, f"the logger {cls.extra}") from error
        return package


class TensorBoardLogger(PackageLogger):
    """Writes event files to ``directory``, by default ``tensorboard`` in the run's directory.

    ``tensorboard --logdir runs`` shows all runs.
    """

    extra = "tensorboard"
    modules = ("torch.utils.tensorboard",)

    def __init__(self, run: LoggedRun, *, directory: str | None = None) -> None:
        folder = run.directory / "tensorboard" if directory is None else Path(directory)
        private_directory(folder)
        # What an earlier process logged of later steps is hidden: these are logged again.
        self._writer = self.load_package().SummaryWriter(
            log_dir=str(folder), purge_step=run.step + 1 if run.step else None
        )
        if not run.step:
            rows = "".join(f"| {key} | {value} |\n" for key, value in run.settings().items())
            self._writer.add_text("config", f"| key | value |\n|---|---|\n{rows}", 0)

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Write the figures of a step."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


class WandbLogger(PackageLogger):
    """Logs to a project of Weights & Biases; offline, to the run's directory, for ``wandb sync``.

    Args:
        project: The project.
        entity: The team or user; None is the account's default.
        mode: None is ``WANDB_MODE``, else online.
        group: Groups runs in the workspace.
        tags: Tags of the run.
    """

    extra = "wandb"
    modules = ("wandb",)

    def __init__(
        self,
        run: LoggedRun,
        *,
        project: str = "turnwise",
        entity: str | None = None,
        mode: Literal["online", "offline", "disabled"] | None = None,
        group: str | None = None,
        tags: list[str] | None = None,
    ) -> None:
        wandb = self.load_package()
        self._run: Any = wandb.init(
            project=project,
            entity=entity,
            mode=mode,
            group=group,
            tags=tags,
            name=run.name,
            id=run.id,
            # A resumed process continues the same run.
            resume="allow",
            dir=str(run.directory),
            config=dict(run.config),
            settings=wandb.Settings(console="off"),
        )
        # wandb's own step only grows; a resumed run logs some of its steps again.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Log the figures of a step."""
        self._run.log({"step": step, **figures})

    def close(self) -> None:
        """Finish the wandb run."""
        self._run.finish()


class TrackioLogger(PackageLogger):
    """Logs to trackio's own folder (``TRACKIO_DIR``), or to a Space; ``trackio show`` shows it.

    Args:
        run: What is logged.
        project: The project.
        space_id: A Hugging Face Space to log to; None stays on this machine.
    """

    extra = "trackio"
    modules = ("trackio",)

    def __init__(self, run: LoggedRun, *, project: str = "turnwise", space_id: str | None = None) -> None:
        # trackio prints instructions; standard output is reserved for results.
        with contextlib.redirect_stdout(sys.stderr):
            self._run: Any = self.load_package().init(
                project=project,
                # Runs are resumed by name.
                name=f"{run.name}-{run.id}",
                resume="allow",
                space_id=space_id,
                config=dict(run.config),
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Log the figures of a step."""
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        """Flush and finish."""
        with contextlib.redirect_stdout(sys.stderr):
            self._run.finish()


_ID = "turnwise.run_id"
# What MLflow takes at once, and of one parameter.
_PARAMETERS_AT_ONCE, _LONGEST_PARAMETER = 100, 500
_METRICS_AT_ONCE = 1000


class MLflowLogger(PackageLogger):
    """Logs to a tracking server, a database or, by default, a database in the run's directory.

    Args:
        run: The run.
        experiment: The experiment; created if missing.
        tracking_uri: ``http://...`` or ``sqlite:///path``; None is ``MLFLOW_TRACKING_URI``, else ``mlflow.db`` in the
            run's directory.
    """

    extra = "mlflow"
    modules = ("mlflow", "sqlalchemy")  # the default store needs sqlalchemy, and not every mlflow brings it along

    def __init__(self, run: LoggedRun, *, experiment: str = "turnwise", tracking_uri: str | None = None) -> None:
        self._mlflow = self.load_package()
        configured_uri = tracking_uri or self._mlflow.environment_variables.MLFLOW_TRACKING_URI.get()
        uri = configured_uri or f"sqlite:///{(run.directory / 'mlflow.db').resolve()}"
        self._client: Any = self._mlflow.MlflowClient(tracking_uri=uri)
        existing = self._client.get_experiment_by_name(experiment)
        number = self._client.create_experiment(experiment) if existing is None else existing.experiment_id
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

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Log the figures of a step."""
        now = int(time.time() * 1000)
        metrics = [self._mlflow.entities.Metric(_name(name), value, now, step) for name, value in figures.items()]
        for start in range(0, len(metrics), _METRICS_AT_ONCE):
            self._client.log_batch(self._id, metrics=metrics[start : start + _METRICS_AT_ONCE])

    def close(self) -> None:
        """End the run in MLflow."""
        self._client.set_terminated(self._id)


def _name(name: str) -> str:
    """Replace characters that MLflow does not allow (``pass@4``)."""
    return re.sub(r"[^\w\-. :/]", "_", name)
