"""The renderer of the stream to a W&B run: each row is sent once through wandb's own client.

Row n of the stream is line n of the run's history, with `_step` n; `define_metric` gives steps and
operations their own x axes. So the server is queried for its number of rows and gets the following
ones, no matter when a publisher died. Two concurrent writers would write the same lines, but a
claim in the bucket keeps the second one out anyway.

    trackers/wandb/{account}.json        the rows W&B is known to have (its answer may be old)
    trackers/wandb/{account}.claim       the writer; renewed, taken over after CLAIM_S of silence
    trackers/wandb/{account}/acts/{n}    create-only, before an alert or artifact of batch n is sent

There is one W&B run for a Run's whole life. It stays "running" when a publisher ends
(`x_update_finish_state`), and ends when the Run has. If the stream was rewound, W&B rewinds its
run; if W&B refuses, a new run replaces it, and the old one is tagged "superseded".

This module knows wandb and the stream.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import secrets
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.bucket.layout import TRACKERS, Claim, StopOrder
from harness.bucket.orders import ask_to_stop
from harness.bucket.setup_objects import newest_setup, read_diff
from harness.core.world import HarnessError
from harness.look.trackers.run_metadata import acts_of, notes_of
from harness.look.trackers.stream_objects import (
    EVENT,
    Batch,
    BatchHeader,
    StreamRow,
    WandbWatermark,
)
from harness.look.trackers.tracker_registry import RunInfo
from harness.look.trackers.tracker_stream import every_row, newest_header, read, rows_from
from harness.look.trackers.wandb_api import GROUPED, ONE, Account, WandbSilent, nodes_are
from harness.look.trackers.wandb_nodes import WandbNodes, without_node_values
from storage.canonical_json import BadObject, canonical, digest
from storage.errors import NotFound
from storage.stores.objects import ObjectStore

log = logging.getLogger("harness.look.trackers.trackers")

CLAIM_S = 120.0  # how long a writer may be silent before another takes over
RENEW_S = 30.0
STALL_S = 300.0  # if no sent row arrives at W&B for this long, the client is restarted
FINISH_S = 30.0  # for the client to send its buffer
CONFIRM_S = 10.0  # for rows to appear at the server after the client has sent them
EXIT_CODES = {"done": 0, "failed": 1, "stopped": 255}  # 255: as after Ctrl-C
NOTE_EVERY_S = 60.0  # between two reads of the logbook
STEP_AXIS = ("train", "val", "best")
TIME_AXIS = (
    *("cost", "goodput", "spot", "world", "nodes", "ckpt", "restore", "live"),
    *("split", "ranks", "event", "alerts", "hardware", "node"),
)
SETTINGS: dict[str, Any] = {
    # Console, code and machine would be those of the publisher's process, not of the training.
    "silent": True,
    "console": "off",
    "disable_git": True,
    "disable_code": True,
    "disable_job_creation": True,
    "x_disable_stats": True,
    "x_disable_meta": True,
    "x_disable_machine_info": True,
    "x_save_requirements": False,
    "finish_timeout": FINISH_S,
    "init_timeout": 60.0,
}


def define_axes(run: Any) -> None:
    """Define the x axes: steps for metrics of training, wall time for operations."""
    for prefixes, axis in ((STEP_AXIS, "train/step"), (TIME_AXIS, "time/wall_s")):
        run.define_metric(axis, hidden=True)
        for prefix in prefixes:
            run.define_metric(f"{prefix}/*", step_metric=axis, step_sync=False)


def define_side_job(run: Any, row: StreamRow) -> None:
    """Define the x axis of a side job's metrics: the step they belong to, not the newest one."""
    sections = {name.partition("/")[0] for name in row.values} if row.step else set()
    for section in sorted(sections - {"train", "time"}):
        run.define_metric(f"{section}/*", step_metric="train/step", step_sync=False)


def settings_of(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return our settings, overridden by variables such as WANDB_X_DISABLE_STATS."""
    found: dict[str, Any] = {}
    for name, value in SETTINGS.items():
        said = environ.get(f"WANDB_{name.upper()}")
        if said and isinstance(value, bool):
            found[name] = said.lower() in ("1", "true", "yes", "on")
        else:
            found[name] = type(value)(said) if said else value
    return found


class WandbBehind(HarnessError):
    """W&B reports fewer rows than it had confirmed; sending now could erase rows."""


@dataclass
class WandbRun:
    """The publisher of one run to one account. `about` returns the arguments of `init` that
    describe the run, besides its id: config, tags, notes and so on."""

    store: ObjectStore
    info: RunInfo
    account: Account
    api: Any  # the module wandb
    about: Callable[[], Mapping[str, Any]] = dict
    environ: Mapping[str, str] = field(default_factory=dict)
    now: Callable[[], float] = time.time
    sleep: Callable[[float], None] = time.sleep
    token: str = field(default_factory=lambda: secrets.token_hex(4))
    name = "wandb"

    def __post_init__(self) -> None:
        self._nodes_are = nodes_are(self.environ)
        self._nodes: WandbNodes | None = None
        self._place = f"{TRACKERS}wandb/{self.account.id}"
        self._run: Any = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._told = WandbWatermark()
        self._next = 0  # next row to send
        self._batch = -1  # newest batch that is sent completely
        self.held_elsewhere = False  # another publisher holds the claim
        self._seen = 0  # most rows that W&B was seen to have
        self._claimed_s = self._moved_s = self._noted_s = -1e18

    # ---- rounds ----------------------------------------------------------------------------------
    def round(self, last: bool = False) -> bool:
        """Publish what is new. With `last`, also confirm that it has arrived, and end W&B's run if
        the Run has ended (not earlier, as more rows may follow). Return whether everything is
        published. Raise StoreError, WandbSilent, WandbBehind, and whatever wandb raises."""
        newest = self._newer()
        if newest is None or not self._claim():
            return False
        self._told = self._read_told()
        if newest.number == self._told.ended:
            return True
        if self._run is None:
            self._open(newest)
        self._send(newest)
        if not last:
            if not self._confirm(0.0) and self.now() - self._moved_s > STALL_S:
                log.warning(
                    "wandb: %d rows do not arrive; beginning anew", self._next - self._told.rows
                )
                self.close()
            return False
        batch = self._batch
        self._finish()  # the client sends every 15 s, and when it ends
        self._batch = batch
        arrived = self._confirm(CONFIRM_S)
        self._batch = -1
        if arrived and newest.end:
            self._finish(EXIT_CODES.get(newest.end, 1))
            self._save(ended=newest.number)
        return arrived

    def close(self) -> None:
        """End the client without ending the run. Never raise. The next client sends again what has
        not arrived."""
        with contextlib.suppress(Exception):  # this may be called because the client is dead
            self._finish()
        with contextlib.suppress(Exception):
            self.api.teardown()
        self._run = None

    def release(self) -> None:
        """Release the claim if it is ours, so that another publisher can write at once. Raise
        StoreError."""
        claim = f"{self._place}.claim"
        with contextlib.suppress(NotFound, BadObject):
            if Claim.decode(self.store.get(claim)).by == self.token:
                self.store.delete(claim)
        self._claimed_s = -1e18

    def _newer(self) -> BatchHeader | None:
        if self._batch < 0:
            return newest_header(self.store)
        found: BatchHeader | None = None
        number = self._batch + 1
        with contextlib.suppress(NotFound):
            while True:
                found = read(self.store, number)[0]
                number += 1
        return found or read(self.store, self._batch)[0]

    @property
    def run_id(self) -> str:
        """The id of the W&B run, the same for every attempt, publisher and machine."""
        given = self.environ.get("WANDB_RUN_ID")
        made = given or digest(canonical(["rows", self.info.id]))[:16]
        return f"{made}-{self._told.again}" if self._told.again else made

    # ---- opening ---------------------------------------------------------------------------------
    def _open(self, newest: BatchHeader) -> None:
        there = self.account.run(self.run_id)
        if there is None and self._told.rows:
            log.warning("wandb: run %s was deleted there; a new one takes over", self.run_id)
            self._save(batch=-1, rows=0, again=self._told.again + 1, ended=-1, rewound=-1)
        rows = there.last_step + 1 if there else 0
        if there and not self._told.rows <= rows <= there.rows:
            raise WandbBehind(
                f"wandb: wanted at least {self._told.rows} rows in run {self.run_id}, found "
                f"{there.rows} up to _step {there.last_step}; it is asked again"
            )
        keep = self._void_from(max(self._told.batch, self._told.rewound), newest.number)
        if keep is not None and rows > keep:
            rows = self._rewound(keep, newest.number)
        if self._run is None:
            self._run = self._init(resume="allow")
            self._keep_diff()
        if int(self._run.starting_step) != rows:
            found, self._next = int(self._run.starting_step), rows
            self.close()
            raise WandbBehind(f"wandb: wanted to go on at row {rows}, found that it is {found}")
        self._next, self._seen, self._moved_s = rows, rows, self.now()

    def _void_from(self, since: int, newest: int) -> int | None:
        """Return the first row that may be void at W&B because the stream was rewound after batch
        `since`, or `None`."""
        keep: int | None = None
        end_row = read(self.store, since)[0].end_row if since >= 0 else 0
        for number in range(since + 1, newest + 1):
            header = read(self.store, number)[0]
            if header.first_row < end_row:
                keep = min(header.first_row, end_row if keep is None else keep)
            end_row = header.end_row
        return keep

    def _rewound(self, keep: int, newest: int) -> int:
        """Make W&B drop the rows from `keep` on, as the stream did up to batch `newest`. Return how
        many rows W&B has then."""
        # reduce the recorded number first: otherwise, after a crash here, W&B would seem behind
        self._save(rows=min(keep, self._told.rows))
        try:
            self._run = self._init(resume_from=f"{self.run_id}?_step={keep - 1}")
            there = self.account.run(self.run_id)
            if there and there.last_step == keep - 1:
                log.info("wandb: rewound to row %d", keep)
                self._save(rewound=newest)
                return keep
        except self.api.errors.Error as e:
            log.warning("wandb: it does not rewind (%s)", type(e).__name__)
        self.close()
        old = self._init(resume="allow", final=True, tags=["superseded"])
        old.finish(exit_code=EXIT_CODES["stopped"])
        self._save(batch=-1, rows=0, again=self._told.again + 1, ended=-1, rewound=-1)
        log.warning("wandb: run %s takes over", self.run_id)
        return 0

    def _init(self, final: bool = False, **how: Any) -> Any:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(
                prefix="harness-wandb-", ignore_cleanup_errors=True
            )
        about = dict(self.about())
        if self._nodes_are == GROUPED:
            about["group"] = self._group()
        about["tags"] = [*about.get("tags", ()), *how.pop("tags", ())]
        if self._told.again:
            about["tags"].append(f"takes-over-{self._told.again}")
        run = self.api.init(
            mode="online",
            id=self.run_id,
            project=self.account.project,
            entity=self.account.entity,
            dir=self._folder.name,
            settings=self._settings(final, stop_fn=self._asked_to_stop),
            **about,
            **how,
        )
        define_axes(run)
        return run

    def _settings(self, final: bool, **more: Any) -> Any:
        return self.api.Settings(
            **settings_of(self.environ),
            base_url=self.account.base_url,
            api_key=self.account.key,
            x_update_finish_state=final,
            **more,
        )

    def _asked_to_stop(self) -> None:
        """Request a stop for W&B's Stop button, only once in a W&B run's life: W&B reports it
        forever, and a run that was stopped may be launched again."""
        if self.store.create(f"{self._place}/stop-{self._told.again}", b"{}"):
            ask_to_stop(self.store, StopOrder("asked for with W&B's Stop button", by="wandb"))
            log.warning("W&B's Stop button: the run is asked to stop")

    # ---- telling ---------------------------------------------------------------------------------
    def _send(self, newest: BatchHeader) -> None:
        if self._batch == newest.number:
            return
        known = self._batch if self._batch >= 0 else self._told.batch
        if self._batch >= 0:  # else it was just opened, which includes this
            keep = self._void_from(self._batch, newest.number)
            if keep is not None and self._next > keep:
                self.close()
                self._next = self._rewound(keep, newest.number)
                self._run = self._run or self._init(resume="allow")
        for row in rows_from(self.store, newest.number, self._next):
            self._log(row)
        self._tell_nodes(newest)
        for number in range(known + 1, newest.number + 1):
            self._act(read(self.store, number))
        # define_metric(summary="min") is not used: a client that resumes restarts the minimum
        for name, (value, step) in newest.best.items():
            self._run.summary.update({f"best/{name}": value, f"best/{name}_step": step})
        self._note()
        self._batch = newest.number

    def _keep_diff(self) -> None:
        """Save the uncommitted changes from the run's setup record as W&B's diff.patch."""
        with contextlib.suppress(BadObject, OSError):
            setup = newest_setup(self.store)
            if setup and (diff := read_diff(self.store, setup)) and self._folder is not None:
                path = Path(self._folder.name) / "diff.patch"
                path.write_bytes(diff)
                self._run.save(str(path), base_path=self._folder.name, policy="now")

    def _note(self) -> None:
        """Update the run's notes, since the logbook grows during the run."""
        if self.environ.get("WANDB_NOTES") or self.now() - self._noted_s < NOTE_EVERY_S:
            return
        self._noted_s = self.now()
        if (notes := notes_of(self.store)) and notes != self._run.notes:
            self._run.notes = notes

    def _log(self, row: StreamRow) -> None:
        assert row.number == self._next, "rows have no gaps"
        values = row.values if self._nodes_are == ONE else without_node_values(row.values)
        if row.kind == EVENT:
            define_side_job(self._run, row)
        self._run.log({**values, "_timestamp": row.t}, step=row.number, commit=True)
        self._next = row.number + 1

    def _tell_nodes(self, newest: BatchHeader) -> None:
        """Publish the runs of nodes if wanted. A failure must not delay the training's rows."""
        if self._nodes_are != GROUPED:
            return
        if self._nodes is None:
            run_id = self.environ.get("WANDB_RUN_ID") or self.run_id
            where = (self.store, self.info, self.account, self.api)
            self._nodes = WandbNodes(*where, run_id, self._settings, self._group())
        try:
            self._nodes.round(newest.number, over=bool(newest.end))
        except Exception as e:  # W&B and its client fail in many ways; the next round retries
            log.warning("wandb: nodes are not told (%s: %s)", type(e).__name__, e)
            self._nodes.forget()

    def _act(self, batch: Batch) -> None:
        """Send the alerts and artifacts of one batch, at most once."""
        acts = acts_of(self.store, self.info, batch, self._companion)
        if acts and self.store.create(f"{self._place}/acts/{batch[0].number:08d}", b"{}"):
            for act in acts:
                try:
                    act(self.api, self._run)
                # W&B and its client fail in many ways, and no row must wait for an artifact
                except Exception as e:
                    log.warning("wandb: %s is not told (%s)", act.__name__, type(e).__name__)

    def _group(self) -> str:
        """Return the name of the group of all W&B runs that belong to this one."""
        said = self.environ.get("WANDB_RUN_GROUP") or self.about().get("group")
        return str(said or self.run_id)

    def _companion(self, job_type: str, name: str) -> Any:
        """Open another W&B run in the same group."""
        assert self._folder is not None
        return self.api.init(
            mode="online",
            id=f"{self.run_id}-{name}",
            project=self.account.project,
            entity=self.account.entity,
            name=f"{self.info.name} {name}",
            group=self._group(),
            config={"run": self.run_id},
            job_type=job_type,
            tags=[job_type],
            dir=self._folder.name,
            resume="allow",
            reinit="create_new",
            settings=self._settings(True),
        )

    def _confirm(self, wait_s: float) -> bool:
        """Return whether every sent row arrived within `wait_s`; if so, record it in the bucket."""
        until_s = self.now() + wait_s
        while True:
            with contextlib.suppress(WandbSilent):  # the rows may arrive nevertheless
                there = self.account.run(self.run_id)
                rows = there.last_step + 1 if there else 0
                if there and rows == self._next <= there.rows:
                    if (self._told.batch, self._told.rows) != (self._batch, rows):
                        self._save(batch=self._batch, rows=rows)
                    self._moved_s = self.now()
                    return True
                if rows > self._seen:
                    self._seen, self._moved_s = rows, self.now()
            if self.now() >= until_s:
                return False
            self.sleep(1.0)

    def _finish(self, exit_code: int | None = None) -> None:
        """End the client. With an exit code, also end the run."""
        run, self._run = self._run, None
        self._batch = -1
        if self._nodes is not None:
            with contextlib.suppress(Exception):  # missing rows are sent again
                self._nodes.close()
            self._nodes.forget()
        if run is not None:
            run.finish()
        if exit_code is not None:
            ending = self._init(final=True, resume="allow")
            ending.finish(exit_code=exit_code)
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    # ---- the state in the bucket -----------------------------------------------------------------
    def _read_told(self) -> WandbWatermark:
        with contextlib.suppress(NotFound, BadObject):
            return WandbWatermark.decode(self.store.get(f"{self._place}.json"))
        return WandbWatermark()

    def _save(self, **changes: int) -> None:
        self._told = dataclasses.replace(self._told, **changes)
        body = self._told.encode(self.account.project, self.run_id)
        self.store.put(f"{self._place}.json", body)

    def _claim(self) -> bool:
        """Acquire or renew the claim. Return whether this publisher may write."""
        self.held_elsewhere = False
        claim, t = f"{self._place}.claim", self.now()
        if t - self._claimed_s < RENEW_S:
            return True
        mine = Claim(self.token, t).encode()
        if not self.store.create(claim, mine):
            try:
                held = Claim.decode(self.store.get(claim))
            except NotFound:
                return False  # just released; the next round may take it
            except BadObject:
                held = Claim("", 0.0)  # a damaged claim has no holder
            if held.by != self.token and t - held.t < CLAIM_S:
                self.held_elsewhere = True
                self.close()
                return False
            self.store.put(claim, mine)
            # if two replace it at the same time, the later wins, and usually both see this here
            if self.store.get(claim) != mine:
                return False
        self._claimed_s = t
        return True


__all__ = ["CLAIM_S", "WandbBehind", "WandbRun", "WandbSilent", "WandbWatermark"]


# The writer of the whole stream as one offline run, by wandb's own client, for `wandb sync`.


def write_offline(
    store: ObjectStore, info: RunInfo, api: Any, about: Mapping[str, Any], folder: Path
) -> list[Path]:
    """Write `folder`/offline-run-* without the client's logs. Return its files, or an empty list if
    there is no stream. `api`: the module wandb. Raise StoreError, BadInput."""
    newest = newest_header(store)
    if newest is None:
        return []
    with tempfile.TemporaryDirectory(
        prefix="harness-wandb-", ignore_cleanup_errors=True
    ) as temporary:
        settings = api.Settings(**SETTINGS, x_update_finish_state=bool(newest.end))
        run = api.init(
            mode="offline",
            id=digest(canonical(["rows", info.id]))[:16],
            dir=temporary,
            resume="allow",
            settings=settings,
            **about,
        )
        define_axes(run)
        for row in every_row(store):
            if row.kind == EVENT:
                define_side_job(run, row)
            run.log({**row.values, "_timestamp": row.t}, step=row.number, commit=True)
        for name, (value, step) in newest.best.items():
            run.summary.update({f"best/{name}": value, f"best/{name}_step": step})
        run.finish(exit_code=EXIT_CODES.get(newest.end, 0))
        # When offline, finish() returns before the client's own process has written the file.
        api.teardown()
        return _kept(Path(temporary), folder)


def _kept(temporary: Path, folder: Path) -> list[Path]:
    """Copy the run's folder without its logs, which contain this machine's paths and settings."""
    found: list[Path] = []
    for directory in (temporary / "wandb").glob("offline-run-*"):
        for path in sorted(directory.rglob("*")):
            inside = path.relative_to(directory)
            if path.is_file() and inside.parts[0] in ("files", path.name):
                target = folder / directory.name / inside
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(path.read_bytes())
                found.append(target)
    return found
