"""A W&B run per node with its hardware metrics over wall time, grouped with the training's run
(HARNESS_WANDB_NODES=grouped).

    trackers/wandb/{account}/nodes.json     up to which batch W&B is known to have the rows

The rows are those of the stream (`metric_rows.py`) without the number of the node's place. Row k of
a node is line k of its run, so W&B is queried for its number of lines and gets the following ones.
They are never rewound: the hardware was busy even if the steps were lost.

This module knows wandb and the stream. The caller must hold the claim of `wandb_run.py`.
"""

from __future__ import annotations

import contextlib
import math
import re
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from harness.bucket.layout import TRACKERS
from harness.look.trackers.stream_objects import EVENT, WALL, StreamRow, WandbNodesWatermark
from harness.look.trackers.tracker_registry import RunInfo
from harness.look.trackers.tracker_stream import read
from harness.look.trackers.wandb_api import Account
from storage.canonical_json import BadObject
from storage.errors import NotFound
from storage.stores.objects import ObjectStore

CONFIRM_EVERY_S = 60.0  # between two queries of what has arrived
IN_PLACE = re.compile(r"node/(\d+)/(.+)")
GONE, LOST = "event/node_gone", "event/node_lost"


def without_node_values(values: Mapping[str, float]) -> dict[str, float]:
    """Return a row of the training's run without the values of nodes."""
    return {name: value for name, value in values.items() if not name.startswith("node/")}


@dataclass
class WandbNodes:
    """The publisher of one run's nodes to W&B. `settings` makes wandb's settings; its argument is
    whether `finish` ends the run there."""

    store: ObjectStore
    info: RunInfo
    account: Account
    api: Any  # the module wandb
    run_id: str  # of the training's run
    settings: Callable[[bool], Any]
    group: str = ""

    def __post_init__(self) -> None:
        self._key = f"{TRACKERS}wandb/{self.account.id}/nodes.json"
        self._told: WandbNodesWatermark | None = None  # as stored in the bucket
        self._batch = -1  # newest batch that is sent completely
        self._rows: dict[str, int] = {}  # number of rows that are sent, by node
        self._ended: dict[str, int] = {}  # exit codes of nodes that are gone
        self._runs: dict[str, Any] = {}
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._looked_s = -1e18

    def round(self, newest: int, over: bool = False) -> None:
        """Publish what is new up to batch `newest`. `over`: the run has ended. Raise StoreError,
        WandbSilent, and whatever wandb raises."""
        if self._told is None:
            self._told = self._read()
            self._batch, self._rows = self._told.batch, dict(self._told.rows)
            self._ended = dict(self._told.ended)
        for number in range(self._batch + 1, newest + 1):
            for row in read(self.store, number)[1]:
                if row.kind == EVENT and not row.again:
                    self._tell(row)
            self._batch = number
        for node in self._rows:
            late = node in self._ended and node in self._runs  # rows after its end
            if late or (over and node not in self._ended):
                self._end(node)
        if self._batch > self._told.batch and time.monotonic() - self._looked_s >= CONFIRM_EVERY_S:
            self.confirm()

    def close(self) -> None:
        """Close the client's runs without ending them, and confirm that all rows have arrived.
        Raise the same errors as `round`."""
        for node in list(self._runs):
            self._runs.pop(node).finish()
        if self._told is not None and self._batch > self._told.batch:
            self.confirm()
        self.forget()

    def forget(self) -> None:
        """Drop all state, so that the next round starts from what W&B has, after the client has
        ended. Never raise."""
        self._told, self._runs = None, {}
        if self._folder is not None:
            with contextlib.suppress(OSError):
                self._folder.cleanup()
            self._folder = None

    def id_of(self, node: str) -> str:
        return f"{self.run_id}-node-{node}"

    # ---- telling ---------------------------------------------------------------------------------
    def _tell(self, row: StreamRow) -> None:
        for node, values in _by_node(row.values).items():
            at = self._rows.get(node, 0)
            run = self._runs.get(node) or self._open(node)
            if at >= int(run.starting_step):
                shared = {WALL: row.values[WALL], "_timestamp": row.t}
                run.log({**values, **shared}, step=at, commit=True)
            self._rows[node] = at + 1
        for name, code in ((GONE, 0), (LOST, 1)):
            if (node := str(_number(row.values, name))) in self._rows:
                self._ended[node] = code
                self._end(node)

    def _open(self, node: str, final: bool = False) -> Any:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(
                prefix="harness-wandb-", ignore_cleanup_errors=True
            )
        run = self.api.init(
            mode="online",
            id=self.id_of(node),
            project=self.account.project,
            entity=self.account.entity,
            name=f"{self.info.name} node {node}",
            group=self.group or self.run_id,
            job_type="node",
            config={"node": node, "run": self.run_id},
            tags=["node"],
            dir=self._folder.name,
            resume="allow",
            reinit="create_new",
            settings=self.settings(final),
        )
        run.define_metric(WALL, hidden=True)
        run.define_metric("*", step_metric=WALL, step_sync=False)
        if not final:
            self._runs[node] = run
        return run

    def _end(self, node: str) -> None:
        """End a node's run at W&B. A node that was lost is shown as failed."""
        if (run := self._runs.pop(node, None)) is not None:
            run.finish()
        code = self._ended.setdefault(node, 0)
        self._open(node, final=True).finish(exit_code=code)

    def confirm(self) -> bool:
        """Record in the bucket that W&B has every row that was sent. Return whether it has. Raise
        StoreError, WandbSilent."""
        assert self._told is not None
        self._looked_s = time.monotonic()
        for node, rows in self._rows.items():
            if rows > self._told.rows.get(node, 0):
                there = self.account.run(self.id_of(node))
                if there is None or there.last_step + 1 < rows:
                    return False
        self._told = WandbNodesWatermark(self._batch, dict(self._rows), dict(self._ended))
        self.store.put(self._key, self._told.encode())
        return True

    def _read(self) -> WandbNodesWatermark:
        try:
            return WandbNodesWatermark.decode(self.store.get(self._key))
        except (NotFound, BadObject):
            return WandbNodesWatermark()  # all is sent again, except for the rows that W&B has


def _number(values: Mapping[str, float], name: str) -> int:
    """Return a value as an integer; 0 if it is missing or not finite."""
    value = values.get(name, 0)
    return int(value) if math.isfinite(value) else 0


def _by_node(values: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Return the readings by node: by its number, or by its place if it was not launched by us."""
    places: dict[str, dict[str, float]] = {}
    for name, value in values.items():
        if found := IN_PLACE.fullmatch(name):
            places.setdefault(found[1], {})[found[2]] = value
    found_nodes: dict[str, dict[str, float]] = {}
    for place, readings in places.items():
        number = _number(readings, "number")
        readings.pop("number", None)
        found_nodes[str(number) if number else f"place-{place}"] = readings
    return found_nodes
