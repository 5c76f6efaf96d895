"""What clouds say of prices and interruptions now, by a true client of theirs, on loopback."""

import json
import urllib.parse
from datetime import datetime, timezone
from xml.sax.saxutils import escape

import pytest

from harness.clouds import price_api
from harness.clouds.live_prices import MarketUrls, ask_clouds
from harness.clouds.sky_broker import SkyError
from harness.core.world import BadInput, CloudUnavailable, Offer
from support.price_pages import DAY_S, NOW, at, serving

P3 = Offer(1.0, "aws/us-east-1/us-east-1a/p3.2xlarge", on_demand_usd_per_h=3.06)
ADVISOR = {
    "ranges": [{"index": 0, "label": "<5%"}, {"index": 2, "label": "10-15%"}],
    "spot_advisor": {"us-east-1": {"Linux": {"p3.2xlarge": {"s": 70, "r": 2}}, "Windows": {}}},
}


class FakeEc2:
    """EC2's query protocol, as far as spot prices need it: pages, newest first, and of each zone
    also the change before the time that is asked for. `refuses`: an error's code."""

    def __init__(self, changes, page=2):
        self.changes, self.page, self.refuses, self.asked = changes, page, "", []

    def answer(self, method, path, headers, body):
        if path == "/advisor.json":
            return 200, json.dumps(ADVISOR).encode()
        ask = {k: v[0] for k, v in urllib.parse.parse_qs(body.decode()).items()}
        self.asked.append(ask)
        if self.refuses or not headers.get("Authorization", "").startswith("AWS4-HMAC-SHA256"):
            code = self.refuses or "AuthFailure"
            return 403, (
                f"<Response><Errors><Error><Code>{code}</Code><Message>You are not authorized to "
                "perform this operation.</Message></Error></Errors><RequestID>1</RequestID></Response>"
            ).encode()
        assert ask["Action"] == "DescribeSpotPriceHistory"
        assert ask["ProductDescription.1"] == "Linux/UNIX"
        begin, end = (
            datetime.fromisoformat(ask[name].replace("Z", "+00:00")).timestamp()
            for name in ("StartTime", "EndTime")
        )
        shapes = {v for k, v in ask.items() if k.startswith("InstanceType.")}
        wanted = []
        for key in {(c[1], c[3]) for c in self.changes if c[3] in shapes}:
            of = sorted(c for c in self.changes if (c[1], c[3]) == key and c[0] <= end)
            before = [c for c in of if c[0] < begin][-1:]
            wanted += before + [c for c in of if c[0] >= begin]
        wanted.sort(reverse=True)
        first = int(ask.get("NextToken", "0"))
        items = "".join(self.item(*one) for one in wanted[first : first + self.page])
        more = first + self.page < len(wanted)
        token = f"<nextToken>{first + self.page}</nextToken>" if more else "<nextToken/>"
        return 200, (
            '<DescribeSpotPriceHistoryResponse xmlns="http://ec2.amazonaws.com/doc/2016-11-15/">'
            f"<requestId>1</requestId><spotPriceHistorySet>{items}</spotPriceHistorySet>{token}"
            "</DescribeSpotPriceHistoryResponse>"
        ).encode()

    @staticmethod
    def item(t, zone, zone_id, shape, usd):
        at = datetime.fromtimestamp(t, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.000Z")
        return (
            f"<item><instanceType>{escape(shape)}</instanceType><productDescription>Linux/UNIX"
            f"</productDescription><spotPrice>{usd:.6f}</spotPrice><timestamp>{at}</timestamp>"
            f"<availabilityZone>{zone}</availabilityZone>"
            f"<availabilityZoneId>{zone_id}</availabilityZoneId></item>"
        )


@pytest.fixture(scope="module")
def boto3():
    return pytest.importorskip("boto3")


def changes(now_s):
    p3, east = "p3.2xlarge", ("us-east-1a", "use1-az6")
    return [
        (now_s - 30 * DAY_S, *east, p3, 0.5),
        (now_s - 9 * DAY_S, *east, p3, 0.9),
        (now_s - 2 * DAY_S, *east, p3, 1.2),
        (now_s - 600.0, *east, p3, 1.1),
        (now_s - DAY_S, "us-east-1b", "use1-az1", p3, 2.0),
        (now_s - DAY_S, "us-east-1b", "use1-az1", "g4dn.xlarge", 0.2),
    ]


def asking(boto3, url):
    """SkyPilot's broker with a true client of EC2."""

    def sky(method, timeout_s, region, **arguments):
        assert method == "spot_prices" and timeout_s > 0
        client = boto3.client(
            "ec2",
            region_name=region,
            endpoint_url=url,
            aws_access_key_id="AKIAEXAMPLE",
            aws_secret_access_key="example",
        )
        try:
            return json.loads(json.dumps(price_api.price_changes(client, **arguments)))
        except Exception as e:
            raise SkyError(type(e).__name__, str(e)) from e

    return sky


def test_prices_of_a_week_through_a_true_client(boto3):
    fake = FakeEc2(changes(NOW))
    by_id = Offer(2.5, "aws/us-east-1/use1-az1/p3.2xlarge")
    lab, dear = Offer(0.9, "lambda/us-central1/x"), Offer(3.06, P3.name + "/on-demand", spot=False)
    with serving(fake) as url:
        found, notes = ask_clouds(
            asking(boto3, url), [P3, by_id, lab, dear], 2, NOW, at(url)
        )
    assert notes == []
    assert [one.offer.name for one in found] == [lab.name, P3.name, dear.name, by_id.name]
    live = {one.offer.name: one for one in found}
    # two nodes; what held when the week began counts from then on
    assert live[P3.name].changes == (
        (NOW - 7 * DAY_S, 1.8),
        (NOW - 2 * DAY_S, 2.4),
        (NOW - 600.0, 2.2),
    )
    assert (live[P3.name].offer.usd_per_h, live[P3.name].catalog_usd_per_h) == (2.2, 1.0)
    assert live[P3.name].interrupted == "10-15%/month"
    assert live[by_id.name].changes == ((NOW - DAY_S, 4.0),)
    assert live[lab.name].changes == live[dear.name].changes == ()
    assert len(fake.asked) == 2  # pages of two


def test_who_does_not_answer_is_named_and_the_catalog_holds(boto3):
    fake = FakeEc2(changes(NOW))
    fake.refuses = "UnauthorizedOperation"
    with serving(fake) as url:
        (one,), notes = ask_clouds(asking(boto3, url), [P3], 1, NOW, at(url))
    assert one.offer == P3 and one.changes == () and one.interrupted == "10-15%/month"
    assert notes[0].startswith("aws/us-east-1: its prices are the catalog's")
    assert "UnauthorizedOperation" in notes[0]

    def silent(method, timeout_s, **_):
        raise CloudUnavailable("no answer within 120 s")

    (one,), notes = ask_clouds(silent, [P3], 1, NOW, at(url))
    assert one.offer == P3 and len(notes) == 2 and "how often it interrupts" in notes[1]
    (one,), notes = ask_clouds(silent, [P3], 1, NOW, MarketUrls("/no/url.json"))
    assert one.offer == P3 and "how often it interrupts is not known (/no/url.json" in notes[1]
    # nobody is asked of clouds that tell nothing
    assert ask_clouds(silent, [Offer(1.0, "lambda/a/c")], 1, NOW)[1] == []


@pytest.mark.parametrize("body", [b"", b"[]", b"<html>", b'{"ranges": [], "spot_advisor": {"a": 1}}'])
def test_what_is_no_advice_is_refused(body):
    with pytest.raises(BadInput, match="wanted the data of AWS's Spot Instance Advisor"):
        price_api.interruption_bands(body)
