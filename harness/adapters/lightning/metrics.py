"""The values that a Lightning script logs in its training step, made equal on every rank. Runs in
the worker.

Each rank runs the training step for its own micro-batches only, or its part of them where ranks
share a copy of the model: then those at the same place in each copy are combined here, and those of
a copy by Lightning itself (sync_dist=True). The value shown for a step is the
one that rank 0 of the script's first world would have logged: that of its last micro-batch, or with
sync_dist=True the mean over all of its ranks. The value shown for an epoch is the mean (sum,
minimum, maximum) over all micro-batches, as with sync_dist=True. Metrics of torchmetrics that the
training step updates are combined in the same way, by the reductions that they name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from harness.worker.session import Session

META = (
    "fx",
    "name",
    "prog_bar",
    "logger",
    "on_step",
    "on_epoch",
    "enable_graph",
    "add_dataloader_idx",
    "dataloader_idx",
    "metric_attribute",
)
MOST_SUMMED = 4096  # numbers of a metric of torchmetrics that ranks add up in each step


class StepLogs:
    """The logs of one trainer. Each rank has its own state. `accumulation`, `first_copies`:
    the script's."""

    def __init__(self, trainer: Any, run: Session, accumulation: int, first_copies: int):
        self._trainer, self._run = trainer, run
        self._accumulation, self._first_copies = accumulation, first_copies
        self._known: list[str] = []  # keys that all ranks know, in order
        self._seen: dict[str, Any] = {}  # newest values, to detect new ones
        self._said: dict[str, tuple[torch.Tensor, int]] = {}  # of this step: sum and number
        self._counts: dict[str, int] = {}  # updates of each torchmetrics metric
        self._trained: set[str] = set()  # those that training steps update
        self._kept: dict[str, Any] = {}  # loaded, but not applied yet
        # value and size of the epoch so far, by key: this rank's part, and all ranks' together
        self._part: dict[str, torch.Tensor] = {}
        self._whole: dict[str, torch.Tensor] = {}

    @property
    def _results(self) -> Any:
        return self._trainer.fit_loop.epoch_loop._results

    # ---- in a step -------------------------------------------------------------------------------
    def note(self, m: int, count: int) -> None:
        """Record the logged values of an own micro-batch that is done."""
        last_round = (count - 1) // self._first_copies * self._first_copies
        for key, metric in self._stepwise().items():
            value = metric._forward_cache
            if value is None or self._seen.get(key) is value:
                continue
            self._seen[key] = value
            if m >= last_round if metric.meta.sync.should else m == last_round:
                before, number = self._said.get(key, (torch.zeros_like(value), 0))
                self._said[key] = before + value.detach(), number + 1
        for name, metric in self._metrics().items():
            if metric._update_count != self._counts.get(name, 0):
                self._trained.add(name)

    @contextlib.contextmanager
    def set_aside(self) -> Iterator[None]:
        """Discard what is logged in the body."""
        epoch_loop, metrics = self._trainer.fit_loop.epoch_loop, self._metrics()
        results = epoch_loop._results
        parts = ("_update_count", "_computed", "_forward_cache")
        kept = {
            name: {part: _kept(getattr(one, part)) for part in (*parts, *one._defaults)}
            for name, one in metrics.items()
        }
        epoch_loop._results = type(results)(training=True)
        try:
            yield
        finally:
            epoch_loop._results = results
            for name, metric in metrics.items():
                for part, value in kept[name].items():
                    setattr(metric, part, value)

    def agree_on_step(self) -> None:
        """Combine the values of a step. Collective, after the last micro-batch."""
        peers = self._run._peers
        if peers.control is not None:
            keys = sorted({**self._stepwise(), **self._epochwise()})
            news = torch.tensor([int(any(key not in self._known for key in keys))])
            dist.all_reduce(news, op=dist.ReduceOp.MAX, group=peers.control)
            if news.item():
                self._learn({key: self._described(key) for key in keys})
            if self._known:
                self._share()
        else:
            self._known = sorted(self._stepwise())
            for key, (total, number) in self._said.items():
                self._show(key, total / number)
        self._said.clear()

    def _share(self) -> None:
        device = self._run.device
        none = torch.zeros((), dtype=torch.float64, device=device)
        rows: list[torch.Tensor] = []
        for key in self._known:
            total, number = self._said.get(key, (none, 0))
            rows += [total.detach().to(device, torch.float64).reshape(()), none + number]
        keeps = self._run._keeper.is_sound  # else nobody reads what they add up to
        epochwise = [key for key in self._known if keeps and _adds_up(self._results[key])]
        news = [self._since_last(key) for key in epochwise]
        sums = torch.cat([torch.stack(rows), *news])
        dist.all_reduce(sums, group=self._run._peers.across or self._run._peers.everyone)
        at = len(rows)
        for key, own in zip(epochwise, news, strict=True):
            self._whole[key] = self._whole.get(key, 0.0) + sums[at : at + len(own)]
            at += len(own)
        for i, key in enumerate(self._known):
            metric, summed, parts = self._results[key], sums[2 * i], sums[2 * i + 1]
            if not metric.meta.on_step:
                continue
            added_up = metric.meta.sync.should and metric.meta.is_sum_reduction
            value = summed if added_up else summed / parts
            before = metric._forward_cache
            old = value if before is None else before.to(device, torch.float64)
            self._show(key, torch.where(parts > 0, value, old))

    def _show(self, key: str, value: torch.Tensor) -> None:
        metric = self._results[key]
        before = metric._forward_cache
        dtype = before.dtype if before is not None else torch.get_default_dtype()
        metric._forward_cache = self._seen[key] = value.to(dtype)
        if metric.is_tensor and not metric.meta.on_epoch:
            metric.value = metric._forward_cache

    def _stepwise(self) -> dict[str, Any]:
        """Return the metrics that the training step logs for each step."""
        return {
            key: metric
            for key, metric in self._results.items()
            if metric.meta.on_step and metric.meta.fx == "training_step" and not metric.has_reset
        }

    def _epochwise(self) -> dict[str, Any]:
        """Return the metrics that the training step logs for the epoch."""
        return {
            key: metric
            for key, metric in self._results.items()
            if metric.meta.on_epoch and metric.meta.fx == "training_step" and not metric.has_reset
        }

    def _since_last(self, key: str) -> torch.Tensor:
        """Return what this rank has added to the epoch's numbers since it was last asked."""
        numbers = [torch.as_tensor(one) for one in _epoch_so_far(self._results[key])]
        now = torch.cat([one.to(self._run.device, torch.float64).reshape(-1) for one in numbers])
        before, self._part[key] = self._part.get(key, 0.0), now
        return now - before

    # ---- keys that this rank does not know -------------------------------------------------------
    def _described(self, key: str) -> dict[str, Any]:
        metric = self._results[key]
        said = {name: getattr(metric.meta, name) for name in META}
        return said | {
            "reduce_fx": metric.meta.reduce_fx.__name__,
            "sync": bool(metric.meta.sync.should),
            "is_tensor": metric.is_tensor,
        }

    def _learn(self, mine: dict[str, dict[str, Any]]) -> None:
        every: dict[str, dict[str, Any]] = {}
        for said in self._run._peers.gather(mine):
            every |= said
        for key in sorted(every):
            self._make(key, every[key])
        self._known = sorted({*self._known, *every})

    def _make(self, key: str, said: dict[str, Any]) -> None:
        """Create the metric, empty, that another rank has logged."""
        if key in self._results:
            self._results[key].has_reset = False
            return
        results = type(self._results).__module__
        module = __import__(results, fromlist=["_Metadata"])
        meta = module._Metadata(
            **{name: said[name] for name in META}, reduce_fx=getattr(torch, said["reduce_fx"])
        )
        strategy = self._trainer.strategy
        meta.sync = module._Sync(_should=said["sync"], fn=strategy.reduce)
        metric = module._ResultMetric(meta, said["is_tensor"]).to(self._run.device)
        if not said["is_tensor"]:
            metric.value = self._trainer.lightning_module.get_submodule(said["metric_attribute"])
        self._results[key] = metric

    # ---- at an epoch's end -----------------------------------------------------------------------
    def agree_on_epoch(self) -> None:
        """Combine the values of an epoch before the hooks of its end. Collective."""
        peers, mine = self._run._peers, self.state_dict()
        every = [mine] if peers.control is None else peers.gather(_on_host(mine))
        every = every[peers.rank % peers.replica_ranks :: peers.replica_ranks]
        if len(every) > 1:
            self._take(_together(every))
        for each in (self._seen, self._trained, self._part, self._whole):
            each.clear()

    # ---- state -----------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the epoch so far."""
        logged = {}
        for key, metric in self._results.items():
            if metric.meta.fx == "training_step" and not metric.has_reset:
                logged[key] = {
                    **self._described(key),
                    "value": float(metric.value) if metric.is_tensor else 0.0,
                    "size": int(getattr(metric, "cumulated_batch_size", 0)),
                    "shown": None
                    if metric._forward_cache is None
                    else float(torch.as_tensor(metric._forward_cache).detach()),
                }
        metrics = {
            name: {
                "updates": int(metric._update_count),
                "states": {state: getattr(metric, state) for state in metric._defaults},
                "reductions": {
                    state: getattr(reduction, "__name__", "") if reduction else ""
                    for state, reduction in metric._reductions.items()
                },
            }
            for name, metric in self._metrics().items()
            if name in self._trained
        }
        return {"logged": logged, "metrics": metrics, "copy_ranks": self._run.replica_ranks}

    def state_alone(self) -> dict[str, Any] | None:
        """Return the epoch so far of all ranks together; None: of some of it this rank knows its
        own part only."""
        state = self.state_dict()
        if self._run._peers.control is None:
            return state
        unknown = set(state["metrics"])
        for key, metric in self._epochwise().items():
            if not _adds_up(metric) or key not in self._whole:
                return None
            if metric.is_tensor:
                value, size = self._whole[key].tolist()
                state["logged"][key] |= {"value": value, "size": int(size)}
            elif (said := state["metrics"].get(name := metric.meta.metric_attribute)) is not None:
                states, at = said["states"], 0
                for part, own in states.items():
                    whole, at = self._whole[key][at : at + own.numel()], at + own.numel()
                    states[part] = whole.to(own.dtype).reshape(own.shape)
                said["updates"] = int(self._whole[key][-1])
                unknown.discard(name)
        return None if unknown else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep the state until `take_up`."""
        self._kept = state

    def load_state_dicts(self, states: list[dict[str, Any]]) -> None:
        """Load all ranks' states of another world: the first copy's rank takes those at its place,
        and the others begin empty. Of copies of another size rank 0 takes all."""
        peers, ranks = self._run._peers, self._run.replica_ranks
        if states[0]["copy_ranks"] == ranks:
            whole, takes = _together(states[peers.rank % ranks :: ranks]), peers.replica == 0
        else:
            whole, takes = _together(states), peers.rank == 0
        self._kept = whole if takes else _nothing(whole)

    def take_up(self) -> None:
        """Apply the state that was loaded."""
        kept, self._kept = self._kept, {}
        if kept:
            self._take(kept)

    def _take(self, whole: dict[str, Any]) -> None:
        device = self._run.device
        for key, said in whole["logged"].items():
            self._make(key, said)
            metric = self._results[key]
            metric._computed = None
            metric._update_count = max(1, metric._update_count)
            if said["is_tensor"]:
                metric.value = torch.tensor(said["value"], dtype=metric.value.dtype, device=device)
                if metric.meta.is_mean_reduction:
                    metric.cumulated_batch_size = torch.tensor(said["size"], device=device)
            if said["shown"] is not None:
                metric._forward_cache = torch.tensor(said["shown"], device=device)
        metrics = self._metrics()
        for name, said in whole["metrics"].items():
            metric = metrics[name]
            metric._computed = None
            metric._update_count = self._counts[name] = said["updates"]
            self._trained.add(name)
            for state, value in said["states"].items():
                setattr(metric, state, _to(value, device))

    def _metrics(self) -> dict[str, Any]:
        """Return the module's torchmetrics metrics, by name."""
        module = self._trainer.lightning_module
        return {
            name: part
            for name, part in module.named_modules()
            if "_reductions" in vars(part) and "_update_count" in vars(part)
        }


def _together(states: list[dict[str, Any]]) -> dict[str, Any]:
    """Combine the states of all ranks for an epoch into that of a single rank."""
    logged: dict[str, Any] = {}
    metrics: dict[str, Any] = {}
    for state in states:
        for key, said in state["logged"].items():
            logged[key] = _both(logged[key], said) if key in logged else said
        for name, said in state["metrics"].items():
            metrics[name] = _merged(metrics[name], said) if name in metrics else said
    return {"logged": logged, "metrics": metrics}


def _adds_up(metric: Any) -> bool:
    """Return whether the epoch's value is made of sums over what was logged, and not of many."""
    if not metric.meta.on_epoch:
        return False
    if metric.is_tensor:
        return bool(metric.meta.is_mean_reduction or metric.meta.is_sum_reduction)
    *parts, _ = _epoch_so_far(metric)
    ways = [getattr(one, "__name__", "") for one in metric.value._reductions.values()]
    sums = set(ways) <= {"dim_zero_sum"} and all(isinstance(one, torch.Tensor) for one in parts)
    return sums and sum(one.numel() for one in parts) <= MOST_SUMMED


def _epoch_so_far(metric: Any) -> list[Any]:
    """Return the numbers behind this rank's value of the epoch: sum and size, or the states of a
    metric of torchmetrics and how often it was updated."""
    if metric.is_tensor:
        return [metric.value, getattr(metric, "cumulated_batch_size", 0)]
    inner = metric.value
    return [*(getattr(inner, state) for state in inner._defaults), inner._update_count]


def _both(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    values = one["value"], other["value"]
    value = {"max": max, "min": min}.get(one["reduce_fx"], lambda pair: sum(pair))(values)
    shown = one["shown"] if one["shown"] is not None else other["shown"]
    return {**one, "value": value, "size": one["size"] + other["size"], "shown": shown}


def _merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    states = {
        name: _reduced(one["reductions"][name], value, other["states"][name])
        for name, value in one["states"].items()
    }
    return {**one, "states": states, "updates": one["updates"] + other["updates"]}


def _reduced(how: str, one: Any, other: Any) -> Any:
    """Reduce two states by the name of a torchmetrics function, such as dim_zero_sum."""
    if isinstance(one, list) or isinstance(other, list):
        return [*_listed(one), *_listed(other)]
    other = other.to(one.device)
    match how.removeprefix("dim_zero_"):
        case "sum":
            return one + other
        case "max":
            return torch.maximum(one, other)
        case "min":
            return torch.minimum(one, other)
        case "cat":
            return torch.cat([one, other])
        case _:
            return one


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _nothing(whole: dict[str, Any]) -> dict[str, Any]:
    """Return a state with keys and names, but no values, for a rank without a part in it."""
    empty = {"max": float("-inf"), "min": float("inf")}
    logged = {
        key: {**said, "value": empty.get(said["reduce_fx"], 0.0), "size": 0}
        for key, said in whole["logged"].items()
    }
    return {"logged": logged, "metrics": {}}


def _kept(value: Any) -> Any:
    """Return a copy of what could be changed in place."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return list(value) if isinstance(value, list) else value


def _to(value: Any, device: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    return [_to(each, device) for each in value] if isinstance(value, list) else value


def _on_host(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state on the host, to be sent to other ranks."""
    metrics = {
        name: {
            **said,
            "states": {state: _to(value, "cpu") for state, value in said["states"].items()},
        }
        for name, said in state["metrics"].items()
    }
    return {**state, "metrics": metrics}
