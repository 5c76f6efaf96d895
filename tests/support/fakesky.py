"""A SkyPilot API server as `skypilot.py` sees it through the broker: slow launches, stale statuses,
clusters that vanish.

Time stands still until `tick` is called. What the true server was seen to do is written beside what
does it here.
"""

import itertools

from harness.clouds.sky_broker import SkyError


def answer(name, usd, *, on_demand=None, spot=True, accelerator="H100", gpus=8):
    cloud, region = name.split("/")[:2]
    return {
        "name": name,
        "place": f"{cloud}/{region}",
        "usd_per_h": usd,
        "on_demand_usd_per_h": on_demand if on_demand is not None else 5 * usd,
        "spot": spot,
        "accelerator": accelerator,
        "gpus": gpus,
        "resources": {
            "infra": "/".join(name.split("/")[:3]),
            "use_spot": spot,
            "job_recovery": {"strategy": "FAILOVER"},
        },
    }


class FakeSky:
    """Answers `Sky` calls. `offers`: what the optimizer finds; `trouble[name or place]`: errors
    of its next launches."""

    def __init__(self, offers=(), launch_s=20.0, down_s=7.0):
        self.found, self.launch_s, self.down_s = list(offers), launch_s, down_s
        self.now_s = 1000.0
        self.ids = itertools.count(1)
        self.states = {}  # request -> (due, cluster, kind, error)
        self.records = {}  # cluster -> record; what status shows
        self.real = set()  # clusters that the cloud has
        self.jobs, self.logs, self.configs = {}, {}, {}
        self.trouble = {}  # infra -> list of SkyError, one for each launch there
        self.down_trouble = []
        self.calls = []

    def __call__(self, method, timeout_s, **arguments):
        assert 0 < timeout_s <= 600
        self.calls.append((method, arguments))
        return getattr(self, method)(**arguments)

    def now(self):
        return self.now_s

    def tick(self, seconds):
        self.now_s += seconds
        for rid, (due, name, kind, error) in list(self.states.items()):
            if due is None or self.now_s < due:
                continue
            self.states[rid] = (None, name, kind, error)
            if kind == "down":
                if error is None:
                    self.real.discard(name)
                    self.records.pop(name, None)
            elif error is None:
                self.real.add(name)
                # the time of the end replaces that of the start
                self.records[name].update(status="UP", ever_up=True, launched_at=int(due))
                self.jobs[name] = "RUNNING"
            else:
                self.records.pop(name, None)

    # -- what the broker answers --
    def offers(self, config, clouds, on_demand):
        return self.found

    def launch(self, name, config, secrets, idle_minutes):
        self.configs[name] = (config, secrets, idle_minutes)
        errors = self.trouble.get(config["resources"]["infra"], [])
        error = errors.pop(0) if errors else None
        rid = f"r{next(self.ids)}"
        self.states[rid] = (self.now_s + self.launch_s, name, "launch", error)
        self.records[name] = {
            "name": name,
            "status": "INIT",
            "launched_at": int(self.now_s),
            "ever_up": False,
            "unhealthy": False,
            "why": "",
            "node": config["envs"].get("HARNESS_NODE"),
            "run": config["envs"].get("RUN"),
            "resources": "1x(...)",
            "user": "ada",
            "autostop": -1 if idle_minutes is None else idle_minutes,
            "managed": False,
        }
        return rid

    def requests(self, ids):
        known = {rid: self.states[rid] for rid in ids if rid in self.states}
        return {
            rid: "RUNNING" if due is not None else "FAILED" if error else "SUCCEEDED"
            for rid, (due, _, _, error) in known.items()
        }

    def outcome(self, id):
        if id not in self.states:
            raise SkyError("RuntimeError", f"Failed to get request {id}: 404")
        if error := self.states[id][3]:
            raise error

    def launching(self, name):
        return next(
            (
                rid
                for rid, (due, n, kind, _) in self.states.items()
                if due is not None and n == name and kind == "launch"
            ),
            None,
        )

    def clusters(self, prefix, refresh=()):
        # a refreshed record that the cloud does not know is removed; without a refresh it stays UP
        for name in refresh:
            if name in self.records and name not in self.real and self.records[name]["ever_up"]:
                del self.records[name]
        return [dict(r) for name, r in self.records.items() if name.startswith(prefix)]

    def job(self, name):
        if name not in self.real:
            raise SkyError("CommandError", "Slurm job has expired")
        return self.jobs.get(name)

    def tail(self, name, lines):
        return self.logs.get(name, "")

    def costs(self, prefix):  # of all clusters that it ever had
        return [
            {"name": name, "duration": 1.0, "total_cost": 1.0}
            for name in self.configs
            if name.startswith(prefix)
        ]

    def machines(self):
        return {"found": [], "silent": {}}

    def down(self, name):
        if name not in self.records:
            raise SkyError("ClusterDoesNotExist", f"Cluster '{name}' does not exist.")
        for rid, (due, n, kind, _) in list(self.states.items()):  # a launch that goes on is ended
            if n == name and kind == "launch" and due is not None:
                self.states[rid] = (
                    None,
                    n,
                    kind,
                    SkyError("RequestCancelled", "cancelled by another process"),
                )
        rid = f"r{next(self.ids)}"
        error = self.down_trouble.pop(0) if self.down_trouble else None
        self.states[rid] = (self.now_s + self.down_s, name, "down", error)
        return rid

    # -- what happens to clusters --
    def take_away(self, name):
        self.real.discard(name)

    def end_job(self, name, state, log=""):
        self.jobs[name], self.logs[name] = state, log

    def restart(self):
        """The API server is restarted: what it was doing is interrupted, what it knows is kept."""
        for rid, (due, name, kind, _) in list(self.states.items()):
            if due is not None:
                self.states[rid] = (
                    None,
                    name,
                    kind,
                    SkyError("RequestInterruptedError", "the API server was restarted"),
                )


EAST, WEST = answer("aws/us-east-1/use1-az1/p5", 10.0), answer("nebius/eu-north1/p5", 12.0)
