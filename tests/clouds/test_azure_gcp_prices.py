"""What Azure and Google say of spot prices and evictions: their protocols on loopback, logins by
the programs and packages that SkyPilot's own clouds use."""

import json
import os
import sys
import urllib.parse

import pytest

from harness.clouds import azure_prices, gcp_prices
from harness.clouds.live_prices import ask_clouds
from harness.clouds.price_api import ask_json
from harness.clouds.sky_broker import Calls, SkyError, told
from harness.core.world import CloudUnavailable, Offer
from support.price_pages import DAY_S, NOW, at, serving

NC24, ND96 = "Standard_NC24ads_A100_v4", "Standard_ND96isr_H100_v5"
TOKEN = "eyJ0eXAiOiJKV1Q.example"


def row(shape, region, usd, sku=" Spot", **other):
    """Of the Retail Prices API, with all of its fields."""
    return {
        "currencyCode": "USD",
        "tierMinimumUnits": 0.0,
        "retailPrice": usd,
        "unitPrice": usd,
        "armRegionName": region,
        "location": region.upper(),
        "effectiveStartDate": "2027-01-01T00:00:00Z",
        "meterId": "000a794b-bdb0-58be-a0cd-0c3a0f222923",
        "meterName": f"{shape[9:].replace('_', ' ')}{sku}",
        "productId": "DZH318Z0BQPS",
        "skuId": "DZH318Z0BQPS/00TG",
        "productName": "Virtual Machines NCadsA100v4 Series",
        "skuName": f"{shape[9:].replace('_', ' ')}{sku}",
        "serviceName": "Virtual Machines",
        "serviceId": "DZH313Z7MMC8",
        "serviceFamily": "Compute",
        "unitOfMeasure": "1 Hour",
        "type": "Consumption",
        "isPrimaryMeterRegion": True,
        "armSkuName": shape,
        **other,
    }


RETAIL = [
    row(NC24, "eastus", 3.673, sku=""),
    row(NC24, "eastus", 9.9, effectiveStartDate="2026-12-01T00:00:00Z"),
    row(NC24, "eastus", 0.734, effectiveEndDate="2027-01-31T23:59:59Z"),
    row(NC24, "eastus", 0.5, effectiveStartDate="2027-02-01T00:00:00Z"),
    row(NC24, "eastus", 0.4, effectiveEndDate="2027-01-10T23:59:59Z"),
    row(NC24, "eastus", 1.9, productName="Virtual Machines NCadsA100v4 Series Windows"),
    row(NC24, "eastus", 2.9, productName="Virtual Machines NCCadsv5 Srs Win"),
    row(NC24, "eastus", 0.3, sku=" Low Priority"),
    row(NC24, "eastus", 0.2, type="DevTestConsumption"),
    row(NC24, "westeurope", 1.1),
    row(NC24, "westus3", 0.0),
    row(ND96, "eastus", 29.496),
]
EVICTIONS = [("standard_nc24ads_a100_v4", "eastus", "20+"), ("standard_nd96isr_h100_v5", "westeurope", "5-10"),
             ("standard_nc24ads_a100_v4", "westeurope", "0-5"), ("standard_d2s_v4", "eastus", "0-5")]  # fmt: skip


class FakeAzure:
    """Retail prices by pages with a link to the next; Resource Graph for a bearer, by pages too."""

    def __init__(self, page=4):
        self.page, self.asked, self.fails = page, [], None

    def answer(self, method, path, headers, body):
        self.asked.append((method, path))
        if self.fails:
            return self.fails
        if path.startswith("/graph?api-version=2022-10-01"):
            return self.graph(headers, json.loads(body))
        where, _, query = path.partition("?")
        asked = {k: v[0] for k, v in urllib.parse.parse_qs(query).items()}
        # what the API knows of OData: terms joined by `and`, values that are spelled as it does
        terms = dict(term.split(" eq ") for term in asked["$filter"].split(" and "))
        assert where == "/retail" and terms["serviceName"] == "'Virtual Machines'"
        kinds = {"'Consumption'": ("Consumption", "DevTestConsumption")}[terms["priceType"]]
        rows = [r for r in RETAIL if f"'{r['armSkuName']}'" == terms["armSkuName"] and r["type"] in kinds]
        first = int(asked.get("$skip", 0))
        more = first + self.page < len(rows)
        link = f"http://{headers['Host']}{where}?" + urllib.parse.urlencode(
            {"$filter": asked["$filter"], "$skip": first + self.page}
        )
        return 200, json.dumps({
            "BillingCurrency": "USD", "CustomerEntityId": "Default", "CustomerEntityType": "Retail",
            "Items": rows[first : first + self.page], "NextPageLink": link if more else None,
            "Count": len(rows[first : first + self.page]),
        }).encode()  # fmt: skip

    def graph(self, headers, ask):
        if headers.get("Authorization") != f"Bearer {TOKEN}":
            error = {"code": "AuthenticationFailed", "message": "Authentication failed."}
            return 401, json.dumps({"error": error}).encode()
        assert "subscriptions" not in ask  # SpotResources are a tenant's
        query, options = ask["query"], ask["options"]
        assert query.startswith("SpotResources | where type =~ 'microsoft.compute/skuspotevictionrate/location'")
        assert "project id," in query and options["resultFormat"] == "objectArray"
        found = [
            {"id": f"/providers/x/{shape}/{region}", "skuName": shape, "location": region, "spotEvictionRate": band}
            for shape, region, band in EVICTIONS
            if f"'{shape}'" in query and f"'{region}'" in query
        ]
        first = int(options.get("$skipToken", 0))
        body = {"totalRecords": len(found), "count": 1, "data": found[first : first + 1], "facets": [],
                "resultTruncated": "false"}  # fmt: skip
        if first + 1 < len(found):
            body["$skipToken"] = str(first + 1)
        return 200, json.dumps(body).encode()


def sku(words, group, usd, usage="Preemptible", regions=("us-central1", "us-east1"), **other):
    """Of the Cloud Billing Catalog."""
    nanos = round(usd * 1e9)
    return {
        "name": "services/6F81-5844-456A/skus/0000-0000-0000",
        "skuId": "0000-0000-0000",
        "description": words,
        "category": {
            "serviceDisplayName": "Compute Engine",
            "resourceFamily": "Compute",
            "resourceGroup": group,
            "usageType": usage,
        },
        "serviceRegions": list(regions),
        "pricingInfo": [
            {
                "effectiveTime": "2027-01-14T10:52:50.681Z",
                "summary": "",
                "pricingExpression": {
                    "usageUnit": "h",
                    "displayQuantity": 1,
                    "tieredRates": [
                        {
                            "startUsageAmount": 0,
                            "unitPrice": {
                                "currencyCode": "USD",
                                "units": str(nanos // 10**9),
                                "nanos": nanos % 10**9,
                            },
                        }
                    ],
                },
                "currencyConversionRate": 1,
            }
        ],
        "serviceProviderName": "Google",
        **other,
    }


# of us-central1, as the catalog said in 2026: a2-highgpu-1g cost 1.92768 on spot
SKUS = [
    sku("Nvidia Tesla A100 GPU running in Americas", "GPU", 2.93391, "OnDemand"),
    sku("A2 Instance Core running in Americas", "CPU", 0.03161, "OnDemand"),
    sku("Spot Preemptible A2 Instance Core running in Americas", "CPU", 0.01659),
    sku("Spot Preemptible A2 Instance Core running in Belgium", "CPU", 0.02, regions=["europe-west1"]),
    sku("Spot Preemptible A2 Instance Ram running in Americas", "RAM", 0.00222),
    sku("Nvidia Tesla A100 GPU attached to Spot Preemptible VMs running in Americas", "GPU", 1.5399),
    sku("Nvidia Tesla A100 80GB GPU attached to Spot Preemptible VMs running in Americas", "GPU", 2.0),
    sku("DWS Defined Duration A2 Core running in Americas", "CPU", 0.01739),
    sku("Spot Preemptible N1 Predefined Instance Core running in Americas", "N1Standard", 0.00664),
    sku("Spot Preemptible N1 Predefined Instance Ram running in Americas", "N1Standard", 0.00089),
    sku("Spot Preemptible Custom Instance Core running in Americas", "CPU", 0.007),
    sku("Nvidia Tesla T4 GPU attached to Spot Preemptible VMs running in Americas", "GPU", 0.11),
    sku("Nvidia L4 GPU attached to Spot Preemptible VMs running in Americas", "GPU", 0.22),
    sku("Nvidia L4 GPU attached to Spot Preemptible VMs running in Iowa", "GPU", 0.23),
    sku("Spot Preemptible G2 Instance Core running in Americas", "CPU", 0.01),
    sku("Spot Preemptible G2 Instance Ram running in Americas", "RAM", 0.001),
    {"description": "something new"},
    sku("Spot Preemptible A2 Instance Core of another kind", "CPU", 9.0, pricingInfo=[]),
]


class FakeGoogle:
    """Google's endpoint for tokens, and the catalog by pages for a bearer."""

    def __init__(self, page=5):
        self.page, self.asked, self.tokens = page, [], []

    def answer(self, method, path, headers, body):
        where, _, query = path.partition("?")
        asked = {k: v[0] for k, v in urllib.parse.parse_qs(query or body.decode()).items()}
        if where == "/token":
            assert asked["grant_type"] == "urn:ietf:params:oauth:grant-type:jwt-bearer"
            self.tokens.append(asked["assertion"])
            return 200, json.dumps({"access_token": TOKEN, "expires_in": 3599, "token_type": "Bearer"}).encode()
        if headers.get("Authorization") != f"Bearer {TOKEN}":
            error = {"code": 403, "message": "Cloud Billing API has not been used in project 1", "status": "PERMISSION_DENIED"}
            return 403, json.dumps({"error": error}).encode()
        assert where == "/skus" and asked["currencyCode"] == "USD" and int(asked["pageSize"]) <= 5000
        self.asked.append(asked)
        first = int(asked.get("pageToken", 0))
        more = str(first + self.page) if first + self.page < len(SKUS) else ""
        return 200, json.dumps({"skus": SKUS[first : first + self.page], "nextPageToken": more}).encode()


def put_az(folder, monkeypatch, script):
    """`az`, as a program on the PATH."""
    folder.mkdir(exist_ok=True)
    az = folder / "az"
    az.write_text(f"#!/bin/sh\n{script}\n")
    az.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


LOGGED_IN = f"""test "$1 $2 $3" = "account get-access-token --resource" || exit 9
test "$4" = "https://management.azure.com/" || exit 9
echo '{{"accessToken": "{TOKEN}", "expiresOn": "2027-01-15 09:00:00", "tokenType": "Bearer"}}'"""


MACHINES = {
    "a2-highgpu-1g": (12.0, 85.0),
    "a2-ultragpu-1g": (12.0, 170.0),
    "a3-megagpu-8g": (208.0, 1872.0),
    "g2-standard-4": (4.0, 16.0),
    "n1-highmem-8": (8.0, 52.0),
    "TPU-VM": (None, None),
}


class Broker:
    """SkyPilot's broker in this process, without SkyPilot but for what its catalog knows."""

    def __init__(self, monkeypatch):
        class Catalog:
            @staticmethod
            def get_vcpus_mem_from_instance_type(shape, clouds):
                assert clouds == "gcp"
                return MACHINES[shape]

        # SkyPilot is a seam: its modules are looked up by name, when they are needed
        monkeypatch.setitem(sys.modules, "sky.catalog", Catalog)

    def __call__(self, method, timeout_s, **arguments):
        try:
            return json.loads(json.dumps(getattr(Calls(), method)(**arguments)))
        except Exception as e:
            error = told(e)
            raise SkyError(error["type"], error["message"]) from e


# ---- Azure ---------------------------------------------------------------------------------------
def test_azures_prices_and_evictions(tmp_path, monkeypatch):
    put_az(tmp_path / "bin", monkeypatch, LOGGED_IN)
    offers = [
        Offer(0.9, f"azure/eastus/{NC24}", accelerator="A100-80GB", gpus=1),
        Offer(1.3, f"azure/westeurope/{NC24}", accelerator="A100-80GB", gpus=1),
        Offer(40.0, f"azure/eastus/{ND96}", accelerator="H100", gpus=8),
        Offer(3.7, f"azure/eastus/{NC24}/on-demand", spot=False),
        Offer(0.95, f"azure/westus3/{NC24}"),
    ]
    fake = FakeAzure()
    with serving(fake) as url:
        found, notes = ask_clouds(Broker(monkeypatch), offers, 2, NOW, at(url))
    live = {one.offer.name: one for one in found}
    assert notes == []
    begin_s = NOW - 7 * DAY_S  # it began before, on the 1st: told as of the week's beginning
    assert live[offers[0].name].changes == ((begin_s, 2 * 0.734),)
    assert live[offers[0].name].offer.usd_per_h == 2 * 0.734
    assert live[offers[0].name].catalog_usd_per_h == 0.9
    assert live[offers[0].name].interrupted == "20+%/hour"
    assert live[offers[1].name].changes == ((begin_s, 2.2),)
    assert live[offers[1].name].interrupted == "0-5%/hour"
    assert live[offers[2].name].changes == ((begin_s, 2 * 29.496),)
    assert live[offers[2].name].interrupted == ""  # told elsewhere only
    assert live[offers[3].name].changes == live[offers[4].name].changes == ()
    # one question for each shape, by pages of four; the graph by pages of one
    assert [method for method, _ in fake.asked] == ["GET"] * 4 + ["POST"] * 3


def test_without_a_login_azures_prices_are_known_and_evictions_are_not(tmp_path, monkeypatch):
    offers = [Offer(0.9, f"azure/eastus/{NC24}")]

    def ask(url):
        (one,), (note,) = ask_clouds(Broker(monkeypatch), offers, 1, NOW, at(url))
        assert one.offer.usd_per_h == 0.734 and one.interrupted == ""
        return note

    with serving(FakeAzure()) as url:
        put_az(tmp_path, monkeypatch, 'echo "ERROR: Please run \'az login\' to setup account." >&2; exit 1')
        assert "Please run 'az login'" in ask(url)
        put_az(tmp_path, monkeypatch, "echo nonsense")
        assert "gives no token" in ask(url)
        put_az(tmp_path, monkeypatch, 'echo \'{"accessToken": "old"}\'')
        assert "answered 401 Authentication failed." in ask(url)
        monkeypatch.setenv("PATH", str(tmp_path / "empty"))
        if not os.path.exists(os.path.join(os.path.dirname(sys.executable), "az")):
            assert "wanted Azure's command `az`, found none; pip install 'skypilot[azure]'" in ask(url)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((429, b'{"error": {"code": "429", "message": "Too many  requests"}}'), "answered 429 Too many requests"),
        ((500, b"<html>"), "answered 500 Internal Server Error"),
        ((200, b"<html>"), "wanted JSON, found b'<html>'"),
        ((200, b"[]"), "wanted a JSON object"),
        ((200, b'{"Message": "no"}'), "wanted an answer with Items, found ['Message']"),
    ],
)
def test_an_azure_that_fails_is_named_and_the_catalog_holds(tmp_path, monkeypatch, answer, words):
    put_az(tmp_path, monkeypatch, LOGGED_IN)
    offers, fake = [Offer(0.9, f"azure/eastus/{NC24}")], FakeAzure()
    fake.fails = answer
    with serving(fake) as url:
        (one,), notes = ask_clouds(Broker(monkeypatch), offers, 1, NOW, at(url))
    assert one.offer == offers[0] and one.changes == ()
    assert notes[0].startswith("azure: its prices are the catalog's (") and words in notes[0]
    assert notes[1].startswith("azure: how often it interrupts is not known (")


def test_a_next_page_elsewhere_is_not_asked_for():
    class Elsewhere(FakeAzure):
        def answer(self, *ask):
            status, body = super().answer(*ask)
            return status, body.replace(b"http://127", b"http://evil.example/127")

    fake = Elsewhere()
    with serving(fake) as url:
        azure_prices.spot_prices(NC24, 0.0, NOW, url + "/retail")
        assert len(fake.asked) == 1
        assert azure_prices.spot_prices("x' or 1 eq 1", 0.0, NOW, url + "/retail") == []
        assert len(fake.asked) == 1


def test_a_token_is_not_taken_along_by_a_redirect():
    class Redirects:
        def __init__(self):
            self.asked = []

        def answer(self, method, path, headers, body):
            self.asked.append(path)
            return 302, b"", ("Location", "/b")

    fake = Redirects()
    with serving(fake) as url, pytest.raises(CloudUnavailable, match="answered 302"):
        ask_json(url + "/a", {"Authorization": "Bearer x"})
    assert fake.asked == ["/a"]
    with pytest.raises(CloudUnavailable, match="does not answer"):
        ask_json(url + "/a")  # nobody is there any more


# ---- Google --------------------------------------------------------------------------------------
@pytest.fixture
def google(tmp_path, monkeypatch):
    """A service account of the fake, as SkyPilot would find it."""
    pytest.importorskip("google.auth")
    rsa = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.rsa")
    from cryptography.hazmat.primitives import serialization as written

    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem = key.private_bytes(written.Encoding.PEM, written.PrivateFormat.PKCS8, written.NoEncryption())
    with serving(fake := FakeGoogle()) as url:
        account = {
            "type": "service_account",
            "project_id": "p",
            "private_key_id": "1",
            "private_key": pem.decode(),
            "client_email": "a@p.iam.gserviceaccount.com",
            "client_id": "1",
            "token_uri": url + "/token",
        }
        (tmp_path / "key.json").write_text(json.dumps(account))
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "key.json"))
        yield fake, url


def test_googles_prices_are_sums_of_parts(google, monkeypatch):
    fake, url = google
    offers = [
        Offer(2.0, "gcp/us-central1/us-central1-a/a2-highgpu-1g", accelerator="A100", gpus=2),
        Offer(2.1, "gcp/us-east1/us-east1-b/n1-highmem-8", accelerator="T4", gpus=4),
        Offer(2.2, "gcp/us-east1/us-east1-c/n1-highmem-8", accelerator="cpu"),
        # two prices of one part, no part, a family that is not known
        Offer(2.3, "gcp/us-central1/us-central1-a/g2-standard-4", accelerator="L4", gpus=2),
        Offer(2.4, "gcp/europe-west1/europe-west1-b/a2-highgpu-1g", accelerator="A100", gpus=2),
        Offer(2.5, "gcp/us-central1/us-central1-a/a3-megagpu-8g", accelerator="H100-MEGA", gpus=16),
        Offer(2.6, "gcp/us-central1/us-central1-a/TPU-VM", accelerator="tpu-v5p-8", gpus=2),
        Offer(2.7, "gcp/us-central1/us-central1-a/a2-ultragpu-1g", accelerator="A100-80GB", gpus=2),
    ]
    found, notes = ask_clouds(Broker(monkeypatch), offers, 2, NOW, at(url))
    live = {one.offer.name: one for one in found}
    assert notes == [] and len(fake.tokens) == 1
    usd = {name: one.offer.usd_per_h for name, one in live.items() if one.changes}
    assert usd == pytest.approx(
        {
            offers[0].name: 2 * 1.92768,
            offers[1].name: 2 * (8 * 0.00664 + 52 * 0.00089 + 2 * 0.11),
            offers[2].name: 2 * (8 * 0.00664 + 52 * 0.00089),
            offers[7].name: 2 * (12 * 0.01659 + 170 * 0.00222 + 2.0),
        }
    )
    ((since_s, _),) = live[offers[0].name].changes
    assert NOW - DAY_S < since_s < NOW
    assert all(one.interrupted == "" for one in found)  # Google publishes none
    assert [ask.get("pageToken") for ask in fake.asked] == [None, "5", "10", "15"]


def test_without_a_login_googles_prices_are_the_catalogs(google, tmp_path, monkeypatch):
    _, url = google
    offers = [Offer(2.0, "gcp/us-central1/us-central1-a/a2-highgpu-1g", accelerator="A100", gpus=1)]
    machine = gcp_prices.GcpMachine("us-central1", "a2-highgpu-1g", 12, 85, "A100", 1)
    with pytest.raises(CloudUnavailable, match="answered 403 Cloud Billing API has not been used"):
        gcp_prices.spot_usd([machine], {}, url + "/skus")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "none.json"))
    (one,), (note,) = ask_clouds(Broker(monkeypatch), offers, 1, NOW, at(url))
    assert one.offer == offers[0]
    assert note.startswith("gcp: its prices are the catalog's (") and "none.json" in note
    assert "try gcloud auth application-default login" in note
    monkeypatch.setitem(sys.modules, "google.auth", None)  # as if it were not installed
    (one,), (note,) = ask_clouds(Broker(monkeypatch), offers, 1, NOW, at(url))
    assert "wanted the package google-auth, found none; pip install 'skypilot[gcp]'" in note
