"""How long clouds take: what a run has measured, and what is assumed until it has.

Budgets hold back what launches, drains and ends cost by this.

Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from harness.core.facts import AttemptEnded
from harness.core.world import cloud_of

# what is assumed counts as much as so many measurements: a few short ones prove little, and what
# was too short is paid for
PRIOR_WEIGHT = 9.0


@dataclass(frozen=True)
class CloudTimes:
    """Seconds. `launch_s`: from asking for a node until it is up. `end_s`: from having one
    terminated until it is not billed any more."""

    launch_s: float
    end_s: float


# What is assumed of clouds that are not as a run's settings say (10 and 5 minutes: GPU nodes of the
# big clouds, by SkyPilot). Slurm: on our lab a first launch took 65 s, and ending a node that was
# half dead 38 s; both doubled. Kubernetes ends a pod within its grace, 30 s unless it says more;
# images of some GB take minutes to be pulled.
PRIORS = {
    "kubernetes": CloudTimes(600.0, 120.0),
    "slurm": CloudTimes(130.0, 80.0),
    "ssh": CloudTimes(130.0, 80.0),
}


@dataclass
class Longest:
    """The longest time of some, in seconds, and how many there were."""

    most_s: float = 0.0
    times: int = 0

    def add(self, seconds: float) -> None:
        self.most_s, self.times = max(self.most_s, seconds), self.times + 1

    def expected_s(self, assumed_s: float) -> float:
        """What to reckon with: between what is assumed and the longest, nearer to that the more
        were measured; never less than the longest."""
        weight = PRIOR_WEIGHT / (PRIOR_WEIGHT + self.times)
        return self.most_s + max(0.0, assumed_s - self.most_s) * weight


@dataclass
class _Measured:
    """Of one cloud."""

    launches: Longest = field(default_factory=Longest)
    # from asking a node to leave until it was gone
    leaves: Longest = field(default_factory=Longest)
    # from having one terminated until it was gone
    ends: Longest = field(default_factory=Longest)


@dataclass
class Durations:
    """How long things took, as far as they were seen, by cloud."""

    _by_cloud: dict[str, _Measured] = field(default_factory=dict)
    # ("release" | "terminate", attempt): when first
    _told_s: dict[tuple[str, int], float] = field(default_factory=dict)

    def launched(self, offer: str, seconds: float) -> None:
        """A node of this offer has come up."""
        self._of(offer).launches.add(max(0.0, seconds))

    def told(self, what: str, attempt: int, t: float) -> None:
        """It was asked to leave ("release") or is to be ended ("terminate")."""
        self._told_s.setdefault((what, attempt), t)

    def ended(self, offer: str, fact: AttemptEnded) -> None:
        """How long it took from the word to go until it was gone."""
        released_s, ended_s = (
            self._told_s.pop((what, fact.attempt), None) for what in ("release", "terminate")
        )
        if fact.up_s is None or fact.end == "lost":
            return
        seen = self._of(offer)
        if released_s is not None:
            seen.leaves.add(max(0.0, fact.gone_s - released_s))
        if ended_s is not None:
            seen.ends.add(max(0.0, fact.gone_s - ended_s))

    def launch_s(self, offer: str, usual_s: float) -> float:
        """From asking for a node of this offer until it is up. `usual_s`: assumed of clouds that
        `PRIORS` does not name."""
        prior = PRIORS.get(cloud_of(offer))
        return self._of(offer).launches.expected_s(prior.launch_s if prior else usual_s)

    def end_s(self, offer: str, usual_s: float) -> float:
        """From having it terminated until it is not billed any more. `usual_s`: as above."""
        prior = PRIORS.get(cloud_of(offer))
        return self._of(offer).ends.expected_s(prior.end_s if prior else usual_s)

    def leave_s(self, offer: str, drain_s: float, usual_s: float) -> float:
        """For so long it is billed after it was asked to leave: it drains, for `drain_s` at most,
        then the cloud ends it."""
        return self._of(offer).leaves.expected_s(drain_s + self.end_s(offer, usual_s))

    def _of(self, offer: str) -> _Measured:
        cloud = cloud_of(offer)
        if (found := self._by_cloud.get(cloud)) is None:
            found = self._by_cloud[cloud] = _Measured()
        return found
