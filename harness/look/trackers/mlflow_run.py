"""The stream in MLflow: a server's or a sqlite file's (`MLFLOW_TRACKING_URI`).

    trackers/mlflow/{place}/{generation:04d}.json    create-only: the id of the MLflow run

MLflow counts a row that is sent twice as one point (key, value, timestamp, step), so publishers
need no claim. The tag `spotharness.batch` holds a run's watermark. MLflow forgets nothing: when the
stream is rewound, the next generation gets all rows, and the old run is tagged
`spotharness.superseded` and ends as KILLED.

It knows mlflow (mlflow-skinny is enough) and the stream.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from harness.bucket.layout import TRACKERS
from harness.core.world import BadInput
from harness.look.trackers.stream_objects import WALL, BatchHeader, StreamRow, mlflow_run_of
from harness.look.trackers.tracker_registry import RunInfo
from harness.look.trackers.tracker_stream import newest_header, read, rows_from
from storage.canonical_json import BadObject, canonical, digest
from storage.stores.objects import ObjectStore

# MLflow's own limits, per request and per tag
MOST_METRICS, MOST_PARAMS, NOTE_LETTERS = 1000, 100, 4000
STATUS = {"done": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}


@dataclass
class MlflowRun:
    """The publisher of one run to one tracking server. `about` returns `config` and `tags`."""

    store: ObjectStore
    info: RunInfo
    uri: str
    experiment: str = "spotharness"
    about: Callable[[], Mapping[str, Any]] = dict
    _client: Any = field(default=None, repr=False)
    name = "mlflow"

    def __post_init__(self) -> None:
        self._place = f"{TRACKERS}mlflow/{digest(canonical([self.uri, self.experiment]))[:16]}/"

    def round(self, last: bool = False) -> bool:
        """Send what is new. Return whether MLflow has the run's end. Raises StoreError, BadInput,
        and the exceptions of mlflow."""
        newest = newest_header(self.store)
        if newest is None:
            return False
        run = self._run()
        told = int(run.data.tags.get("spotharness.batch", -1))
        if told == newest.number:
            return newest.end == "done"
        keep, end_row = None, read(self.store, told)[0].end_row if told >= 0 else 0
        first = end_row
        for number in range(told + 1, newest.number + 1):
            header = read(self.store, number)[0]
            keep = header.first_row if told >= 0 and header.first_row < end_row else keep
            end_row = header.end_row
        if keep is not None:
            run, first = self._next_generation(run), 0
        self._tell(run.info.run_id, rows_from(self.store, newest.number, first))
        self._end(run, newest)
        return newest.end == "done"

    def close(self) -> None:
        """Finish without effect: no resource is open."""

    @property
    def client(self) -> Any:
        if self._client is None:
            from mlflow.tracking import MlflowClient

            self._client = MlflowClient(tracking_uri=self.uri)
        return self._client

    def _run(self) -> Any:
        """Return the run of the newest generation."""
        keys = self.store.list(self._place)
        if not keys:
            return self._create(0)
        return self.client.get_run(self._run_id(keys[-1]))

    def _run_id(self, key: str) -> str:
        try:
            return mlflow_run_of(self.store.get(key))
        except BadObject as e:
            raise BadInput(f"{key}: {e}; it was changed") from e

    def _create(self, generation: int) -> Any:
        client = self.client
        found = client.get_experiment_by_name(self.experiment)
        experiment = found.experiment_id if found else client.create_experiment(self.experiment)
        about = self.about()
        tags = {"spotharness.id": self.info.id, "spotharness.generation": str(generation)}
        tags |= {f"spotharness.tag.{tag}": "true" for tag in about.get("tags", ())}
        if notes := about.get("notes"):
            tags["mlflow.note.content"] = notes[:NOTE_LETTERS]
        run = client.create_run(experiment, tags=tags, run_name=self.info.name)
        key = f"{self._place}{generation:04d}.json"
        if not self.store.create(key, canonical({"run_id": run.info.run_id})):
            client.delete_run(run.info.run_id)  # another publisher created it meanwhile
            return client.get_run(self._run_id(key))
        self._tell_config(run.info.run_id, about.get("config", {}))
        return run

    def _tell_config(self, run_id: str, config: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        params = [Param(name, value) for name, value in _params(config).items()]
        for i in range(0, len(params), MOST_PARAMS):
            self.client.log_batch(run_id, params=params[i : i + MOST_PARAMS])

    def _next_generation(self, run: Any) -> Any:
        self.client.set_tag(run.info.run_id, "spotharness.superseded", "true")
        self.client.set_terminated(run.info.run_id, "KILLED")
        return self._create(int(run.data.tags["spotharness.generation"]) + 1)

    def _tell(self, run_id: str, rows: Iterable[StreamRow]) -> None:
        from mlflow.entities import Metric

        waiting: list[Any] = []
        for row in rows:
            step = row.step or int(row.values[WALL])
            for key, value in row.values.items():
                if math.isfinite(value):  # MLflow has no infinity
                    waiting.append(Metric(key, float(value), int(row.t * 1000), step))
            while len(waiting) >= MOST_METRICS:
                self.client.log_batch(run_id, metrics=waiting[:MOST_METRICS])
                del waiting[:MOST_METRICS]
        if waiting:
            self.client.log_batch(run_id, metrics=waiting)

    def _end(self, run: Any, newest: BatchHeader) -> None:
        run_id = run.info.run_id
        for name, (value, step) in newest.best.items():
            self.client.set_tag(run_id, f"best/{name}", f"{value!r} at step {step}")
        status = STATUS.get(newest.end)
        if status:
            self.client.set_terminated(run_id, status)
        elif run.info.status != "RUNNING":
            self.client.update_run(run_id, status="RUNNING")
        self.client.set_tag(run_id, "spotharness.batch", str(newest.number))


def _params(config: Mapping[str, Any]) -> dict[str, str]:
    """Return parameters under names that MLflow accepts; of equal names the first counts."""
    found: dict[str, str] = {}
    for name, value in _flat(config):
        found.setdefault(re.sub(r"[^\w .:-]", "_", name)[:250].strip(".") or "_", value)
    return found


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", str(value)[:500]
