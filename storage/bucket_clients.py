"""obstore's clients of S3, GCS and Azure, made from what the clouds' own tools read.

Knows the clouds' conventions for credentials and endpoints, and fsspec's spelling of options, so
that either can be used. `ObstoreUnusable` says why obstore cannot be.

    S3      options, else botocore's chain (variables, profiles, SSO, web identity, container and
            instance roles) where botocore is installed, else obstore's own (all but profiles and
            SSO). A bucket's region is asked of S3 itself.
    GCS     GOOGLE_APPLICATION_CREDENTIALS, gcloud's application default credentials, the metadata
            server
    Azure   AZURE_STORAGE_* (also a connection string), AZURE_CLIENT_*, managed identity, `az login`
"""

from __future__ import annotations

import contextlib
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from storage.errors import StoreError, StoreRefused

try:
    from obstore import store as _stores

    stores: Any = _stores
except ImportError:
    pass  # `FastStore` says so

REGION_TIMEOUT_S = 5.0
NO_CREDENTIALS = (
    "no credentials found; log in the way your cloud's own tools do (aws configure, aws sso login)"
)


class ObstoreUnusable(Exception):
    """obstore is not installed, or does not know what was asked for."""


# ---- S3 ------------------------------------------------------------------------------------------
MakeClient = Callable[..., Any]


def s3_client(
    bucket: str, options: dict[str, Any], environ: Mapping[str, str]
) -> tuple[MakeClient, Callable[[], Any]]:
    """How to build obstore's store, and a botocore client for what obstore cannot do."""
    client_kwargs = dict(options.pop("client_kwargs", None) or {})
    key, secret, token = (
        options.pop("key", None),
        options.pop("secret", None),
        options.pop("token", None),
    )
    profile, anonymous = options.pop("profile", None), options.pop("anon", False)
    endpoint = options.pop("endpoint_url", None) or client_kwargs.pop("endpoint_url", None)
    region = client_kwargs.pop("region_name", None)
    _none_left({**options, **client_kwargs})
    config: dict[str, Any] = {"disable_bulk_delete": True}
    provider, session = None, _botocore(profile)
    if session is not None:
        endpoint = (
            endpoint
            or environ.get("AWS_ENDPOINT_URL_S3")
            or environ.get("AWS_ENDPOINT_URL")
            or _profile_endpoint(session)
        )
        region = region or session.get_config_variable("region")
    else:
        endpoint = endpoint or environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL")
        region = region or environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION")
    if anonymous:
        config["skip_signature"] = True
    elif key:
        config |= {
            "access_key_id": key,
            "secret_access_key": secret,
            **({"session_token": token} if token else {}),
        }
    elif session is not None:
        provider = _ByBotocore(session)
    elif profile or environ.get("AWS_PROFILE"):
        raise ObstoreUnusable("profiles need botocore (pip install botocore)")
    if endpoint:
        config |= {"endpoint": endpoint, "region": region or "us-east-1"}
    elif str(region).startswith("cn-"):
        raise ObstoreUnusable("regions of another partition have other addresses")
    else:
        config["region"] = _bucket_region(bucket) or region or "us-east-1"
    # TLS proves what arrives; hashing it once more for the signature costs as much as sending it.
    config["unsigned_payload"] = not str(endpoint or "").startswith("http://")

    def build(**arguments: Any) -> Any:
        return stores.S3Store(bucket, config=config, credential_provider=provider, **arguments)

    def client() -> Any:
        if session is None:
            raise StoreError(
                f"s3://{bucket}: unfinished uploads are listed by botocore, which is not installed "
                "(pip install botocore)"
            )
        if key:
            session.set_credentials(key, secret, token)
        return session.create_client("s3", region_name=config["region"], endpoint_url=endpoint)

    return build, client


def _botocore(profile: str | None) -> Any:
    try:
        import botocore.session
    except ImportError:
        return None
    return botocore.session.Session(profile=profile)


def _profile_endpoint(session: Any) -> str | None:
    """`endpoint_url` of the profile in use; botocore itself looks there only for its own
    clients."""
    # ProfileNotFound and broken files: whoever asks for credentials next says it better
    with contextlib.suppress(Exception):
        found = session.get_scoped_config().get("endpoint_url")
        return str(found) if found else None
    return None


class _ByBotocore:
    """Credentials as botocore finds them, asked for when they are needed and again before they
    end."""

    ttl = timedelta(minutes=10)  # botocore renews what it gives us 15 minutes before its end

    def __init__(self, session: Any):
        self._session = session

    def __call__(self) -> dict[str, Any]:
        found = self._session.get_credentials()
        if found is None:
            raise StoreRefused(NO_CREDENTIALS)
        frozen = found.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(timezone.utc) + self.ttl,
        }


_regions: dict[str, str] = {}


def _bucket_region(bucket: str) -> str | None:
    """S3 tells anybody, whatever else it refuses; a node is often in another region than its
    bucket. None: no answer."""
    if bucket not in _regions:
        request = urllib.request.Request(f"https://s3.amazonaws.com/{bucket}", method="HEAD")
        try:
            with urllib.request.urlopen(request, timeout=REGION_TIMEOUT_S) as answer:
                headers = answer.headers
        except urllib.error.HTTPError as e:  # 301, 403, 404 carry it too
            headers = e.headers
        except OSError:
            return None
        found = headers.get("x-amz-bucket-region")
        if not found:
            return None
        _regions[bucket] = found
    return _regions[bucket]


# ---- GCS -----------------------------------------------------------------------------------------
def gcs_client(bucket: str, options: dict[str, Any], environ: Mapping[str, str]) -> MakeClient:
    token, endpoint = options.pop("token", None), options.pop("endpoint_url", None)
    options.pop("project", None)  # of use only to who makes buckets
    _none_left(options)
    if environ.get("STORAGE_EMULATOR_HOST"):
        raise ObstoreUnusable(
            "emulators (STORAGE_EMULATOR_HOST) speak Google's JSON interface, obstore the XML one"
        )
    config: dict[str, Any] = {"base_url": endpoint} if endpoint else {}
    provider = None
    if token == "anon":
        # It would still ask for a token to write; a server that wants none gets an empty name.
        provider = _anybody
    elif isinstance(token, str) and Path(token).is_file():
        config["application_credentials"] = token
    elif token not in (None, "google_default", "cloud"):
        raise ObstoreUnusable(
            f"token={token if isinstance(token, str) else type(token).__name__!r} is for gcsfs"
        )
    return lambda **arguments: stores.GCSStore(
        bucket, config=config, credential_provider=provider, **arguments
    )


def _anybody() -> dict[str, Any]:
    return {"token": "anonymous", "expires_at": None}


# ---- Azure ---------------------------------------------------------------------------------------
def azure_client(container: str, options: dict[str, Any], environ: Mapping[str, str]) -> MakeClient:
    # abfs://container@account.dfs.core.windows.net/path
    container, _, host = container.partition("@")
    config: dict[str, Any] = {}
    connection = options.pop("connection_string", None) or environ.get(
        "AZURE_STORAGE_CONNECTION_STRING"
    )
    if connection:
        fields = dict(part.split("=", 1) for part in connection.split(";") if "=" in part)
        names = {
            "AccountName": "account_name",
            "AccountKey": "account_key",
            "BlobEndpoint": "endpoint",
            "SharedAccessSignature": "sas_key",
        }
        config = {names[k]: v for k, v in fields.items() if k in names}
    spelled = {
        "account_name": "account_name",
        "account_key": "account_key",
        "sas_token": "sas_key",
        "account_host": "endpoint",
    }
    for theirs in ("client_id", "client_secret", "tenant_id"):
        spelled[theirs] = theirs
    config |= {
        ours: value for theirs, ours in spelled.items() if (value := options.pop(theirs, None))
    }
    options.pop("anon", None)
    _none_left(options)
    if host:
        config["account_name"] = host.partition(".")[0]
    # as `az` spells them
    for variable, name in {
        "AZURE_STORAGE_ACCOUNT": "account_name",
        "AZURE_STORAGE_KEY": "account_key",
    }.items():
        if name not in config and environ.get(variable):
            config[name] = environ[variable]
    identified = {"account_key", "sas_key", "client_id"} & config.keys() or any(
        v in environ
        for v in (
            "AZURE_STORAGE_ACCOUNT_KEY",
            "AZURE_STORAGE_SAS_TOKEN",
            "AZURE_CLIENT_ID",
            "AZURE_FEDERATED_TOKEN_FILE",
        )
    )
    if (
        not identified
        and shutil.which("az")
        and (Path.home() / ".azure" / "azureProfile.json").exists()
    ):
        config["use_azure_cli"] = True  # somebody's own computer, after `az login`
    return lambda **arguments: stores.AzureStore(container, config=config, **arguments)


def _none_left(options: Mapping[str, Any]) -> None:
    if options:
        raise ObstoreUnusable(f"it has no such option: {', '.join(sorted(options))}")
