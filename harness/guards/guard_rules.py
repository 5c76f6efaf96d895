"""The rules of the guards: their settings, and the judgement of each step from the loss and the
norm of its gradients. Pure: no torch, no clock.

With mu and sigma the mean and the deviation (of the population) of the last `window` norms:

    most = max(clip_least, mu + clip_sigmas * sigma)     greater gradients are scaled to this norm
    skipped if norm > skip_above * mu                    the optimizer does not step
    skipped if the loss or the norm is NaN or infinite   from the first step on

The window holds the norms of updates as they were applied: of a clipped one `most`, of a skipped
one nothing. So one spike does not widen the bounds for the next. All numbers are sums over all
ranks, so every rank judges alike; the sums here are exact (`math.fsum`) and do not depend on when
the process began. Until `warm_up` steps were applied, only what is not finite is judged.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from harness.core.input_files import yaml_given
from harness.core.world import BadInput
from storage.canonical_json import BadObject, parsed

ADVANCE, HOLD = "advance", "hold"
ALERT, OFF, REWIND = "alert", "off", "rewind"
DEFAULT = "default"
LEFT_OUT = "left out"  # begins the reason of an update that a rewind leaves out
FILE = "guards (--guards)"
SETTINGS = "settings"  # in the state: what was in force, for a replay


@dataclass(frozen=True)
class Guards:
    """The settings of the guards; 0 switches a bound off. `skip`: whether the scheduler steps with
    a skipped update ("advance") or not ("hold"); `spike`: the action for a spike of the loss:
    "alert", "rewind" (rewind.py) or "off"."""

    clip_sigmas: float = 4.0  # deviations above the mean norm
    clip_least: float = 1.0  # a norm below this is never clipped
    skip_above: float = 20.0  # times the mean norm
    skip: str = ADVANCE
    window: int = 128  # steps that mean, deviation and median are of
    warm_up: int = 100  # steps
    most_bad: int = 10  # skipped updates in `bad_window` steps; with one more the run stops
    bad_window: int = 100
    spike: str = ALERT
    spike_deviations: float = 10.0  # median absolute deviations above the median loss, and
    spike_share: float = 0.5  # at least this share of the median above it
    rewind_steps: int = 8  # steps whose updates a rewind leaves out; the last is that of the spike
    most_rewinds: int = 3  # with one more the run stops
    rewarm_steps: int = 0  # after a rewind, the learning rate rises to its value in so many steps

    def __post_init__(self) -> None:
        """Check all settings. Raises BadInput."""
        for one in dataclasses.fields(self):
            _check(one.name, getattr(self, one.name), type(one.default))
        if self.skip not in (ADVANCE, HOLD):
            raise BadInput(f"guards: skip={self.skip!r}: wanted {ADVANCE} or {HOLD}")
        if self.spike not in (ALERT, OFF, REWIND):
            raise BadInput(f"guards: spike={self.spike!r}: wanted {ALERT}, {REWIND} or {OFF}")
        if self.warm_up < 2:
            raise BadInput(f"guards: warm_up={self.warm_up}: wanted at least 2 steps")


LEAST = {"window": 2, "bad_window": 1, "rewind_steps": 1}
MOST_STEPS = 100_000


def _check(name: str, value: Any, kind: type) -> None:
    """Check the type and the bounds of a setting. Raises BadInput."""
    if kind is str:
        if not isinstance(value, str):
            raise BadInput(f"guards: {name}={value!r:.80}: wanted a word")
        return
    numeric = (int, float) if kind is float else (int,)
    if isinstance(value, bool) or not isinstance(value, numeric):
        what = "a number" if kind is float else "a whole number"
        raise BadInput(f"guards: {name}={value!r:.80}: wanted {what}")
    least, most = LEAST.get(name, 0), math.inf if kind is float else MOST_STEPS
    if not (least <= value <= most and math.isfinite(value)):
        upper = f" to {most}" if kind is int else " and finite"
        raise BadInput(f"guards: {name}={value!r:.80}: wanted {least}{upper} at least")


def guards_of(asked: object) -> Guards | None:
    """Return the guards that somebody asked for: `Guards`, a dict of its settings (or one as JSON),
    "default", the name of a YAML file with settings, or "off", "" and None for none. Raises
    BadInput."""
    if asked is None or asked in ("", OFF):
        return None
    if isinstance(asked, Guards):
        return asked
    if asked == DEFAULT:
        return Guards()
    if isinstance(asked, str) and asked.startswith("{"):
        return _built(_parsed(asked), "guards")
    if isinstance(asked, Mapping):
        return _built(asked, "guards=")
    if not isinstance(asked, str | Path):
        raise BadInput(
            f"guards={asked!r:.80}: wanted 'default', 'off', a file, or harness.Guards(...)"
        )
    documents = yaml_given(asked, f"{FILE}: default, off or a YAML file of settings")
    if len(documents) > 1:
        raise BadInput(f"{asked}: wanted one YAML document, found {len(documents)}")
    return _built(documents[0] if documents else {}, str(asked))


def _parsed(text: str) -> object:
    try:
        return parsed(text)
    except BadObject as e:
        raise BadInput(f"guards={text:.80}: wanted settings as JSON: {e}") from None


def _built(settings: object, where: str) -> Guards:
    known = [one.name for one in dataclasses.fields(Guards)]
    if not isinstance(settings, Mapping):
        raise BadInput(f"{where}: wanted settings such as skip_above: 20, found {settings!r:.80}")
    if unknown := [name for name in settings if name not in known]:
        raise BadInput(f"{where}: {unknown[0]!r:.80} is not known; wanted {', '.join(known)}")
    given: dict[str, Any] = dict(settings)
    if given.get("spike") is False:  # YAML reads `spike: off` so
        given["spike"] = OFF
    return Guards(**given)


# ---- the judgement -------------------------------------------------------------------------------
@dataclass(frozen=True)
class StepFinding:
    """The judgement of a step. `skip`: why the optimizer must not step; "": it may. `most_norm`:
    clip to this norm; None: there is no bound yet. `spike`: (loss, usual loss) if a spike of the
    loss begins with this step; `spikes`: it spikes in this step, which may not be the first. `bad`:
    skipped updates in the window, if they are too many, else 0."""

    skip: str = ""
    most_norm: float | None = None
    spike: tuple[float, float] | None = None
    spikes: bool = False
    bad: int = 0
    in_gradients: bool = False  # the losses are finite, the norm is not


@dataclass
class StepRules:
    """The judge of a run's steps, with all that it remembers of them. `bad`: the steps whose update
    was skipped within `bad_window`; `blind`: the newest step whose norm was not finite although all
    losses were (0: none)."""

    guards: Guards
    norms: deque[float] = field(default_factory=deque)
    losses: deque[float] = field(default_factory=deque)
    bad: list[int] = field(default_factory=list)
    applied: int = 0
    skipped: int = 0
    clipped: int = 0
    spiking: bool = False
    blind: int = 0

    def __post_init__(self) -> None:
        self.norms = deque(self.norms, self.guards.window)
        self.losses = deque(self.losses, self.guards.window)

    def judge(self, step: int, loss: float, norm: float, scaled: bool = False) -> StepFinding:
        """Judge a step before its update. `loss`: over the global batch; `norm`: of the gradient of
        that; `scaled`: a GradScaler answers for norms that are not finite."""
        if scaled and math.isfinite(loss) and not math.isfinite(norm):
            return StepFinding()
        mean = math.fsum(self.norms) / len(self.norms) if self._is_warm else 0.0
        most, spike = self._most_norm(mean), self._spike(loss)
        why = self._why_skip(loss, norm, mean)
        if why:
            return self._skipped(step, why, spike, math.isfinite(loss) and not math.isfinite(norm))
        self.applied += 1
        self.losses.append(loss)
        self.clipped += most is not None and norm > most
        self.norms.append(norm if most is None else min(norm, most))
        return StepFinding(most_norm=most, spike=spike, spikes=self.spiking)

    def watches(self, step: int) -> bool:
        """Return whether the gradients of each micro-batch should be looked at in this step: a norm
        was not finite a short time ago, and nobody knows whose it was."""
        return bool(self.blind) and step <= self.blind + self.guards.bad_window

    def _skipped(
        self, step: int, why: str, spike: tuple[float, float] | None, in_gradients: bool
    ) -> StepFinding:
        self.skipped += 1
        self.bad = [one for one in self.bad if one > step - self.guards.bad_window] + [step]
        if in_gradients:
            self.blind = step
        bad = len(self.bad) if len(self.bad) > self.guards.most_bad else 0
        return StepFinding(why, None, spike, self.spiking, bad, in_gradients)

    @property
    def _is_warm(self) -> bool:
        return self.applied >= self.guards.warm_up

    def _most_norm(self, mean: float) -> float | None:
        if not (self.guards.clip_sigmas and self._is_warm):
            return None
        variance = math.fsum([(norm - mean) ** 2 for norm in self.norms]) / len(self.norms)
        return max(self.guards.clip_least, mean + self.guards.clip_sigmas * math.sqrt(variance))

    def _why_skip(self, loss: float, norm: float, mean: float) -> str:
        for what, value in (("loss", loss), ("gradient norm", norm)):
            if not math.isfinite(value):
                return f"the {what} is {value}"
        above = self.guards.skip_above
        if above and mean > 0 and norm > above * mean:
            return f"the gradient norm {norm:.4g} is above {above:g} times its mean {mean:.4g}"
        return ""

    def _spike(self, loss: float) -> tuple[float, float] | None:
        """Return the loss and the usual one, where a spike begins."""
        if self.guards.spike == OFF or not self._is_warm or not math.isfinite(loss):
            return None
        usual, before = median(self.losses), self.spiking
        far = self.guards.spike_share * abs(usual)
        self.spiking = loss > usual + far and loss > usual + self._usual_distance(usual)
        return (loss, usual) if self.spiking and not before else None

    def _usual_distance(self, usual: float) -> float:
        return self.guards.spike_deviations * median([abs(one - usual) for one in self.losses])

    # ---- state -----------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Return all that is remembered, as plain data."""
        names = [one.name for one in dataclasses.fields(self) if one.name != "guards"]
        kept = ((name, getattr(self, name)) for name in names)
        state = {n: list(v) if isinstance(v, deque | list) else v for n, v in kept}
        return state | {SETTINGS: dataclasses.asdict(self.guards)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Remember what `state_dict` returned, as far as it fits into the windows of today."""
        for name, value in state.items():
            if name != SETTINGS:
                setattr(self, name, value)
        self.bad = list(self.bad)
        self.__post_init__()
