"""The run at W&B: the stream's rows, told once each through wandb's own client.

Row n of the stream is line n of the run's history, with `_step` n; steps and operations find their
own x axes by `define_metric`. So the server is asked how many rows it has, and is told the ones
behind them: whoever died, wherever, whenever. Two writers at once would write the same lines; a
claim in the bucket keeps the second one out all the same.

    trackers/wandb/{account}.json        how far W&B is known to be (a server's answer may be old)
    trackers/wandb/{account}.claim       who writes; renewed, taken over after CLAIM_S of silence
    trackers/wandb/{account}/acts/{n}    create-only, before an alert or artifact of batch n is sent

One run for a Run's whole life. It stays "running" when a publisher ends (`x_update_finish_state`),
and ends when the run has. Where the stream was rewound, the run is rewound by W&B; where W&B does
not, a new run takes over, and the old one is tagged "superseded".

Knows wandb and the stream.
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
from harness.bucket.setups import newest_setup, read_diff
from harness.bucket.streamed import EVENT, Batch, BatchHeader, StreamRow, ToldWandb
from harness.core.values import BadObject, canonical, digest
from harness.core.world import HarnessError
from harness.views.artifacts import acts_of
from harness.views.describe import notes_of
from harness.views.plugins import RunInfo
from harness.views.stream import newest_header, read, rows_from
from harness.views.wandb_api import GROUPED, ONE, Account, WandbSilent, nodes_are
from harness.views.wandb_nodes import WandbNodes, without_nodes
from storage.errors import NotFound
from storage.objects import ObjectStore

log = logging.getLogger("harness.views.trackers")

CLAIM_S = 120.0  # how long a writer may be silent before another takes over
RENEW_S = 30.0
STALL_S = 300.0  # without a new row at W&B, while rows are on their way: begin anew
FINISH_S = 30.0  # for the client to send what it has
CONFIRM_S = 10.0  # to see it arrive when the client says that it is sent
EXIT_CODES = {"done": 0, "failed": 1, "stopped": 255}  # 255: as after Ctrl-C
NOTE_EVERY_S = 60.0  # between two looks at the logbook
STEP_AXIS = ("train", "val", "best")
TIME_AXIS = (
    *("cost", "goodput", "spot", "world", "nodes", "ckpt", "restore", "live"),
    *("split", "ranks", "event", "alerts", "hardware", "node"),
)
SETTINGS: dict[str, Any] = {
    # Console, code and machine belong to the publisher's process, not to the training.
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
    """Steps over steps, operations over wall time."""
    for prefixes, axis in ((STEP_AXIS, "train/step"), (TIME_AXIS, "time/wall_s")):
        run.define_metric(axis, hidden=True)
        for prefix in prefixes:
            run.define_metric(f"{prefix}/*", step_metric=axis, step_sync=False)


def define_side_job(run: Any, row: StreamRow) -> None:
    """Numbers of a side job over the step that they are of, which is not the newest."""
    sections = {name.partition("/")[0] for name in row.values} if row.step else set()
    for section in sorted(sections - {"train", "time"}):
        run.define_metric(f"{section}/*", step_metric="train/step", step_sync=False)


def settings_of(environ: Mapping[str, str]) -> dict[str, Any]:
    """Ours, and what a variable such as WANDB_X_DISABLE_STATS says instead."""
    found: dict[str, Any] = {}
    for name, value in SETTINGS.items():
        said = environ.get(f"WANDB_{name.upper()}")
        if said and isinstance(value, bool):
            found[name] = said.lower() in ("1", "true", "yes", "on")
        else:
            found[name] = type(value)(said) if said else value
    return found


class WandbBehind(HarnessError):
    """W&B answers with less than it has confirmed before; what is sent now could erase rows."""


@dataclass
class WandbRun:
    """Tells one account of one run. `about`: what `init` says of the run besides its id: config,
    tags, notes and so on."""

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
        self._told = ToldWandb()
        self._next = 0  # row to send
        self._batch = -1  # of which all rows are sent
        self.held_elsewhere = False  # another publisher writes
        self._seen = 0  # rows that W&B was seen to have
        self._claimed_s = self._moved_s = self._noted_s = -1e18

    # ---- rounds ----------------------------------------------------------------------------------
    def round(self, last: bool = False) -> bool:
        """Tell what is new. `last`: and see it arrive, and end W&B's run if the run has ended: more
        may be said of it before. Is everything told? Raises
        StoreError, WandbSilent, WandbBehind, and what wandb raises."""
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
        self._finish()  # its client sends every 15 s, or when it ends
        self._batch = batch
        arrived = self._confirm(CONFIRM_S)
        self._batch = -1
        if arrived and newest.end:
            self._finish(EXIT_CODES.get(newest.end, 1))
            self._save(ended=newest.number)
        return arrived

    def close(self) -> None:
        """End the client without ending the run; never raises. What has not arrived is sent
        again by the next one."""
        with contextlib.suppress(Exception):  # it may be dead, and that is why we are here
            self._finish()
        with contextlib.suppress(Exception):
            self.api.teardown()
        self._run = None

    def release(self) -> None:
        """Let another publisher write at once, if it was we who wrote. Raises StoreError."""
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
        """The same for every attempt, publisher and machine. Not that of older versions, whose
        `_step` was the training's."""
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
        """From which row on what W&B has may be void: the stream was rewound after batch
        `since`."""
        keep: int | None = None
        end_row = read(self.store, since)[0].end_row if since >= 0 else 0
        for number in range(since + 1, newest + 1):
            header = read(self.store, number)[0]
            if header.first_row < end_row:
                keep = min(header.first_row, end_row if keep is None else keep)
            end_row = header.end_row
        return keep

    def _rewound(self, keep: int, newest: int) -> int:
        """Let W&B forget the rows from `keep` on, as the stream has up to batch `newest`.
        Returns how many it has."""
        # what is known to be there shrinks first: else a crash here looks like an old answer
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
        """W&B's Stop button: once in a run's life, as W&B says it again for ever, and a run that
        was stopped may be launched again."""
        if self.store.create(f"{self._place}/stop-{self._told.again}", b"{}"):
            ask_to_stop(self.store, StopOrder("asked for with W&B's Stop button", by="wandb"))
            log.warning("W&B's Stop button: the run is asked to stop")

    # ---- telling ---------------------------------------------------------------------------------
    def _send(self, newest: BatchHeader) -> None:
        if self._batch == newest.number:
            return
        known = self._batch if self._batch >= 0 else self._told.batch
        if self._batch >= 0:  # else it was just opened, and that is done
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
        # not by define_metric(summary="min"): a client that resumes begins to count anew
        for name, (value, step) in newest.best.items():
            self._run.summary.update({f"best/{name}": value, f"best/{name}_step": step})
        self._note()
        self._batch = newest.number

    def _keep_diff(self) -> None:
        """What was not committed to git, as far as the run's record has it: W&B's diff.patch."""
        with contextlib.suppress(BadObject, OSError):
            setup = newest_setup(self.store)
            if setup and (diff := read_diff(self.store, setup)) and self._folder is not None:
                path = Path(self._folder.name) / "diff.patch"
                path.write_bytes(diff)
                self._run.save(str(path), base_path=self._folder.name, policy="now")

    def _note(self) -> None:
        """The logbook grows while the run goes on."""
        if self.environ.get("WANDB_NOTES") or self.now() - self._noted_s < NOTE_EVERY_S:
            return
        self._noted_s = self.now()
        if (notes := notes_of(self.store)) and notes != self._run.notes:
            self._run.notes = notes

    def _log(self, row: StreamRow) -> None:
        assert row.number == self._next, "rows have no gaps"
        values = row.values if self._nodes_are == ONE else without_nodes(row.values)
        if row.kind == EVENT:
            define_side_job(self._run, row)
        self._run.log({**values, "_timestamp": row.t}, step=row.number, commit=True)
        self._next = row.number + 1

    def _tell_nodes(self, newest: BatchHeader) -> None:
        """Runs of nodes, if they are wanted: no row of the training waits for them."""
        if self._nodes_are != GROUPED:
            return
        if self._nodes is None:
            run_id = self.environ.get("WANDB_RUN_ID") or self.run_id
            where = (self.store, self.info, self.account, self.api)
            self._nodes = WandbNodes(*where, run_id, self._settings, self._group())
        try:
            self._nodes.round(newest.number, over=bool(newest.end))
        except Exception as e:  # W&B and its client fail in many ways; the next round tries again
            log.warning("wandb: nodes are not told (%s: %s)", type(e).__name__, e)
            self._nodes.forget()

    def _act(self, batch: Batch) -> None:
        """Alerts and artifacts of one batch: at most once."""
        acts = acts_of(self.store, self.info, batch, self._companion)
        if acts and self.store.create(f"{self._place}/acts/{batch[0].number:08d}", b"{}"):
            for act in acts:
                try:
                    act(self.api, self._run)
                # W&B and its client fail in many ways, and no row must wait for an artifact
                except Exception as e:
                    log.warning("wandb: %s is not told (%s)", act.__name__, type(e).__name__)

    def _group(self) -> str:
        """Of all runs that belong to this one."""
        said = self.environ.get("WANDB_RUN_GROUP") or self.about().get("group")
        return str(said or self.run_id)

    def _companion(self, job_type: str, name: str) -> Any:
        """A run of the same group."""
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
        """Has W&B every row that was sent?"""
        until_s = self.now() + wait_s
        while True:
            with contextlib.suppress(WandbSilent):  # rows are on their way all the same
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
        """End the client. With an exit code the run ends as well."""
        run, self._run = self._run, None
        self._batch = -1
        if self._nodes is not None:
            with contextlib.suppress(Exception):  # what has not arrived is told again
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

    # ---- what the bucket remembers ---------------------------------------------------------------
    def _read_told(self) -> ToldWandb:
        with contextlib.suppress(NotFound, BadObject):
            return ToldWandb.decode(self.store.get(f"{self._place}.json"))
        return ToldWandb()

    def _save(self, **changes: int) -> None:
        self._told = dataclasses.replace(self._told, **changes)
        body = self._told.encode(self.account.project, self.run_id)
        self.store.put(f"{self._place}.json", body)

    def _claim(self) -> bool:
        """May we write? Renewed while we do."""
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
                held = Claim("", 0.0)  # nobody's
            if held.by != self.token and t - held.t < CLAIM_S:
                self.held_elsewhere = True
                self.close()
                return False
            self.store.put(claim, mine)
            # of two that replace it at once the later stays, and mostly sees so
            if self.store.get(claim) != mine:
                return False
        self._claimed_s = t
        return True


__all__ = ["CLAIM_S", "ToldWandb", "WandbBehind", "WandbRun", "WandbSilent"]
