"""The contracts that ship (`harness.testing`), passed by every policy, cloud and source of ours,
and failed by broken ones."""

import contextlib
import dataclasses
import json
import os
import random
from contextlib import closing

import pytest

from harness.clouds.sky_broker import SkyError
from harness.clouds.sky_clusters import tag
from harness.clouds.sky_task import Task, load
from harness.clouds.skypilot import SkyPilotCloud
from harness.controller import combinators, policies
from harness.core.world import CloudUnavailable, Launch, Offer, Wait
from harness.local import spot_schedule
from harness.local.local_cloud import LocalCloud
from harness.local.metadata_server import MetadataServer, metadata_service
from harness.notices.custom_source import OwnSource, sources_of
from harness.notices.notice import Notice, utc
from harness.notices.sources import FileSource, LimitSource, MithrilSource
from harness.testing import (
    CloudBench,
    CloudContract,
    FaultRates,
    NoticeBench,
    NoticeSourceContract,
    PolicyContract,
    SimCloud,
    Violation,
    VirtualClock,
    pending,
    situation,
    up,
)
from support.fakesky import FakeSky, answer
from support.notice_services import SOON_S, TAINT, ApiServer, source_of


# ---- policies ------------------------------------------------------------------------------------
class TestPoliciesWithNames(PolicyContract):
    @pytest.fixture(
        params=[
            *(name for name in policies.POLICIES if name != "uniform_progress"),
            "patient?premium=1.1&patience_s=600",
            "uniform_progress?deadline_h=1.5&work_h=0.5&total_steps=300",
        ]
    )
    def policy(self, request):
        return policies.resolve(request.param)


class TestLimits(PolicyContract):
    may_stop = True

    @pytest.fixture(params=["budget", "hours"])
    def policy(self, request):
        if request.param == "budget":
            return combinators.within_budget(policies.cheapest, usd=50.0)
        return combinators.within_hours(policies.cheapest, hours=100.0)


class TestReplacing(PolicyContract):
    def most_nodes(self, view):
        return view.max_nodes + len(view.doubted)

    @pytest.fixture
    def policy(self):
        return combinators.replacing(policies.cheapest)


class TestTogether(PolicyContract):
    def most_nodes(self, view):
        return 2 * max(view.max_nodes, len(view.alive))  # a second world is made ready elsewhere

    @pytest.fixture
    def policy(self):
        return combinators.together(policies.best_value, stay_s=600.0)


def policy_test(name, policy):
    return lambda: getattr(PolicyContract(), name)(policy)


def forgetful():
    asked = []

    def policy(view):
        asked.append(view)
        return Wait(1.0, "again" if len(asked) % 2 else "and again")

    return policy


def spoils(view):
    view.blocked.clear()
    return policies.cheapest(view)


@pytest.mark.parametrize(
    ("policy", "found_by"),
    [
        (lambda view: None, "test_it_decides"),
        (lambda view: Wait(0.0, "now"), "test_it_decides"),
        (lambda view: Wait(float("nan"), "never"), "test_it_decides"),
        (lambda view: Launch(Offer(1.0, "elsewhere")), "test_it_decides"),
        (forgetful(), "test_the_same_view_is_the_same_decision"),
        (spoils, "test_the_same_view_is_the_same_decision"),
        (
            lambda view: Launch(view.offers[0]) if view.offers else Wait(1.0),
            "test_it_keeps_to_the_number_of_nodes",
        ),
        (
            lambda view: Launch(view.offers[0]) if view.offers else Wait(1.0),
            "test_a_full_offer_is_not_asked_before_its_time",
        ),
        (lambda view: Launch(Offer(1.0, "x")), "test_without_offers_it_launches_nothing"),
        (
            lambda view: Wait(1.0, f"since {view.now_s:.1f} s"),
            "test_reasons_hold_no_numbers_that_change",
        ),
        (lambda view: Wait(30.0, "I had rather not"), "test_runs_end_in_simulated_worlds"),
    ],
)
def test_a_broken_policy_is_found(policy, found_by):
    with pytest.raises((AssertionError, Violation)):
        policy_test(found_by, policy)()


def test_situations_are_views():
    assert situation().offers[0].name == "a" and situation(now_s=5.0).now_s == 5.0
    view = situation(up(1), pending(2))
    assert [node.up_s is None for node in view.alive] == [False, True]


# ---- clouds --------------------------------------------------------------------------------------
class TestSimulatedCloud(CloudContract):
    @pytest.fixture
    def bench(self):
        clock = VirtualClock()
        weather = FaultRates(calm_s=1e9, available=1.0, kills_per_h=0.0)
        cloud = SimCloud(weather, clock, random.Random(1), lambda event: None)
        free, full, *_ = cloud.offers()
        cloud.available[full.name] = False
        return CloudBench(
            cloud,
            free,
            full,
            reopen=lambda: cloud,
            take_away=lambda attempt: cloud.end(attempt, None, "preempted"),
            sleep=clock.sleep,
            every_s=5.0,
            within_s=600.0,
        )


class TestLocalCloud(CloudContract):
    """Nodes are real processes."""

    @pytest.fixture
    def bench(self, tmp_path):
        task = Task(tmp_path / "t.yaml", "t", "exec sleep 300", workdir=tmp_path)
        more = {"market": "calm", "wanted": (1, 3), "env": dict(os.environ), "gpus": ()}

        def opened():
            return LocalCloud(tmp_path / "state", task, launch_s=0.05, **more)

        cloud = opened()
        yield CloudBench(
            cloud,
            spot_schedule.OFFERS[0],
            reopen=opened,
            take_away=lambda attempt: cloud.event("kill", attempt=attempt),
        )
        cloud.shutdown()


class SilentSky(FakeSky):
    """... whose API server can be made not to answer."""

    silent = False

    def __call__(self, method, timeout_s, **arguments):
        if self.silent:
            raise CloudUnavailable(f"SkyPilot's API server did not answer {method} (test)")
        return super().__call__(method, timeout_s, **arguments)


class TestSkyPilot(CloudContract):
    """Against a fake of SkyPilot's API server."""

    URL = "s3://b/runs/x"

    @pytest.fixture
    def bench(self, tmp_path):
        (tmp_path / "task.yaml").write_text(
            "name: t\nresources: {accelerators: 'H100:8', use_spot: true}\nrun: exec train\n"
        )
        task = load(tmp_path / "task.yaml", {"RUN": self.URL}, use_skypilot=False)
        east, west = answer("aws/us-east-1/use1-az1/p5", 10.0), answer("nebius/eu-north1/p5", 12.0)
        sky = SilentSky([east, west])
        full = SkyError(
            "ResourcesUnavailableError",
            "Failed",
            [("ResourcesUnavailableError", "InsufficientInstanceCapacity")],
        )
        sky.trouble[west["resources"]["infra"]] = [full] * 9
        made = []

        def opened():
            cloud = SkyPilotCloud(task, self.URL, sky, ask_every_s=0.0, now=sky.now)
            cloud.look()
            cloud._watcher = True  # the test looks, on the fake's clock
            made.append(cloud)
            return cloud

        def sleep(seconds):
            sky.tick(seconds)
            for cloud in made:
                for _ in range(3):
                    with contextlib.suppress(CloudUnavailable):  # as its own thread does
                        cloud.look()
                    for attempt in cloud._attempts.values():
                        if attempt.polls.poll:
                            attempt.polls.poll.exception()

        def silence(on):
            sky.silent = on
            sleep(200.0)  # longer than an old look is believed

        cloud = opened()
        free, refused = cloud.offers()
        yield CloudBench(
            cloud,
            free,
            refused,
            reopen=opened,
            take_away=lambda attempt: sky.take_away(f"{tag(self.URL)}-{attempt:04d}"),
            silence=silence,
            sleep=sleep,
            every_s=5.0,
            within_s=600.0,
        )
        for one in made:
            one._pool.shutdown()


def cloud_test(name, cloud, clock):
    free = cloud.offers()[0]
    bench = CloudBench(
        cloud, free, reopen=lambda: cloud, sleep=clock.sleep, every_s=5.0, within_s=300.0
    )
    getattr(CloudContract(), name)(bench)


class Doubles(SimCloud):
    """Two machines for two calls."""

    def launch(self, attempt, offer):
        super().launch(attempt if attempt not in self.all else attempt + 100, offer)


class Strict(SimCloud):
    def terminate(self, attempt):
        self.all[attempt]
        super().terminate(attempt)


class Revives(SimCloud):
    def launch(self, attempt, offer):
        if attempt in self.all and not self.all[attempt].alive:
            del self.all[attempt]
        super().launch(attempt, offer)


class Hides(SimCloud):
    def nodes(self):
        return [node for node in super().nodes() if node.up_s is None]


class Deaf(SimCloud):
    def terminate(self, attempt):
        pass


@pytest.mark.parametrize(
    ("broken", "found_by"),
    [
        (Doubles, "test_launch_is_idempotent"),
        (Strict, "test_terminate_of_an_unknown_attempt_does_nothing"),
        (Revives, "test_terminate_ends_one_node_for_good"),
        (Hides, "test_a_node_comes_up"),
        (Deaf, "test_a_node_may_be_ended_while_it_is_launched"),
    ],
)
def test_a_broken_cloud_is_found(broken, found_by):
    clock = VirtualClock()
    weather = FaultRates(calm_s=1e9, available=1.0, kills_per_h=0.0)
    for kind in (SimCloud, broken):
        cloud = kind(weather, clock, random.Random(1), lambda event: None)
        if kind is SimCloud:
            cloud_test(found_by, cloud, clock)
        else:
            with pytest.raises((AssertionError, KeyError)):
                cloud_test(found_by, cloud, clock)


# ---- notices -------------------------------------------------------------------------------------
class TestCloudsNotices(NoticeSourceContract):
    @pytest.fixture(params=["aws", "gcp", "azure"])
    def cloud(self, request):
        return request.param

    @pytest.fixture(params=["kill", "soft", "maintenance"])
    def bench(self, cloud, request):
        kind = request.param
        names = []
        with closing(MetadataServer(metadata_service(cloud, "vm-7"))) as server:
            yield NoticeBench(
                source_of(cloud, server.endpoint, kind),
                announce=lambda: names.append(server.protocol.notice(kind, SOON_S)),
                withdraw=lambda: server.protocol.cancel(names[-1]),
                silence=lambda on: server.inject(**({"status": 503} if on else {})),
                kind=kind,
                deadline_s=SOON_S if kind != "soft" and cloud != "gcp" else float("nan"),
            )


class TestKubernetes(NoticeSourceContract):
    @pytest.fixture
    def bench(self, tmp_path):
        with closing(ApiServer(tmp_path)) as api:
            api.source.pace_s = 0.02
            yield NoticeBench(
                api.source,
                announce=lambda: api.node["spec"].update(taints=[TAINT]),
                withdraw=lambda: api.node["spec"].update(taints=[]),
                kind="kill",
                deadline_s=utc("2026-11-21T08:02:00Z"),
            )


class TestFiles(NoticeSourceContract):
    @pytest.fixture
    def bench(self, tmp_path):
        path = tmp_path / "notice"
        said = json.dumps({"kind": "maintenance", "deadline_s": SOON_S})
        return NoticeBench(
            FileSource(path, pace_s=0.02),
            announce=lambda: path.write_text(said),
            withdraw=path.unlink,
            kind="maintenance",
            deadline_s=SOON_S,
        )


class TestMithril(NoticeSourceContract):
    @pytest.fixture
    def bench(self, tmp_path):
        path = tmp_path / "MITHRIL_SIGNAL.yml"
        said = "instance_status: STATUS_PREEMPTING\nend_time: 2026-11-21T08:05:00Z\n"
        return NoticeBench(
            MithrilSource(path, pace_s=0.02, settle_s=0.0),
            announce=lambda: path.write_text(said),
            withdraw=path.unlink,
            kind="kill",
            deadline_s=utc("2026-11-21T08:05:00Z"),
        )


class TestEndsThatAreKnown(NoticeSourceContract):
    @pytest.fixture
    def bench(self):
        return NoticeBench(LimitSource("slurm", SOON_S), kind="maintenance", deadline_s=SOON_S)


in_force: list[Notice] = []


def mine():
    if in_force == ["raise"]:
        raise OSError("no answer")
    return list(in_force)


class TestOwnFunction(NoticeSourceContract):
    """A user's function (`--notices pkg.mod:function`), which may raise."""

    @pytest.fixture
    def bench(self):
        in_force.clear()
        (source,) = sources_of(f"{__name__}:mine")
        source.pace_s = 0.05
        known = []

        def silence(on):
            nonlocal known
            if on:
                known, in_force[:] = list(in_force), ["raise"]
            else:
                in_force[:] = known

        def announce():
            (known if in_force == ["raise"] else in_force).append(Notice("", "kill", "n", None))

        def withdraw():
            (known if in_force == ["raise"] else in_force).clear()

        return NoticeBench(source, announce, withdraw, silence, kind="kill", deadline_s=None)


class Source:
    """Whole; the broken ones differ from it."""

    name, pace_s, errors = "broken", 0.01, 0

    def __init__(self):
        self.there, self.n = [], 0

    def announce(self):
        self.there = [Notice(self.name, "kill", "n", None)]

    def poll(self):
        return self.there

    def acknowledge(self, notice):
        return False

    def close(self):
        pass


class OtherIds(Source):
    def poll(self):
        self.n += 1
        return [dataclasses.replace(n, id=f"n{self.n}") for n in self.there]


class OtherName(Source):
    def announce(self):
        self.there = [Notice("somebody", "kill", "n", None)]


class Shouts(Source):
    def poll(self):
        return [Notice(self.name, "kill", "n", None)]


class NoBool(Source):
    def acknowledge(self, notice):
        return None


class NoPace(Source):
    pace_s = 0.0


@pytest.mark.parametrize(
    ("broken", "found_by"),
    [
        (OtherIds, "test_a_notice_is_heard_once_and_its_end_too"),
        (OtherName, "test_a_notice_is_whole"),
        (Shouts, "test_calm_is_no_notice"),
        (NoBool, "test_acknowledging_says_whether_it_was_heard"),
        (NoPace, "test_it_is_a_source"),
    ],
)
def test_a_broken_source_is_found(broken, found_by):
    for kind in (Source, broken):
        source = kind()
        bench = NoticeBench(source, announce=source.announce, withdraw=source.there.clear)
        bench.withdraw = lambda source=source: source.there.clear()
        if kind is Source:
            getattr(NoticeSourceContract(), found_by)(bench)
        else:
            with pytest.raises(AssertionError):
                getattr(NoticeSourceContract(), found_by)(bench)


def test_a_wrapped_source_is_whole_whatever_is_inside():
    inner = OtherName()
    bench = NoticeBench(OwnSource(inner), announce=inner.announce)
    NoticeSourceContract().test_a_notice_is_whole(bench)
