"""Buckets through obstore (Rust): large buffers leave and arrive in parallel parts, uncopied, and
without Python's lock.

Knows s3://, gs:// and az://, their conventions for credentials and endpoints, and fsspec's spelling
of options, so that either can be used. `Unfit` says why it cannot be; `open_store` then takes
fsspec. A store is opened in the process that uses it, not before a fork.

    S3      options, else botocore's chain (variables, profiles, SSO, web identity, container and
            instance roles) where botocore is installed, else obstore's own (all but profiles and
            SSO). A bucket's region is asked of S3 itself.
    GCS     GOOGLE_APPLICATION_CREDENTIALS, gcloud's application default credentials, the metadata
            server
    Azure   AZURE_STORAGE_* (also a connection string), AZURE_CLIENT_*, managed identity, `az login`
"""

from __future__ import annotations

import contextlib
import functools
import re
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np

from storage.errors import NotFound, StoreError, StoreRefused, StoreUnavailable
from storage.objects import Keys
from storage.remote import (
    FULL,
    Named,
    abort_s3_uploads,
    denied,
    full,
    list_s3_keys,
    no_bucket,
    no_credentials,
)

try:
    import obstore
    from obstore import exceptions as errors
    from obstore import store as _stores

    stores: Any = _stores
except ImportError:
    obstore = None  # type: ignore[assignment]

PART_NBYTES = 16 << 20  # of an upload
READ_NBYTES = 8 << 20  # of a parallel read
AT_ONCE = 8  # requests of one call
SMALL_AT_ONCE = 32  # small objects that `get_each` reads at once
MAX_PARTS = 9000  # S3 allows 10000
REQUEST_TIMEOUT_S = 300.0  # of one request: a part at 430 kB/s with all of `AT_ONCE` on their way
CONNECT_TIMEOUT_S = 10.0
SILENCE_TIMEOUT_S = 60.0  # of a read
PART_RETRIES = 3  # of one part: a lost connection shall not cost the whole object
REGION_TIMEOUT_S = 5.0
NO_CREDENTIALS = (
    "no credentials found; log in the way your cloud's own tools do (aws configure, aws sso login)"
)


class Unfit(Exception):
    """obstore is not installed, or does not know what was asked for."""


class FastStore:
    """`s3://`, `gs://` or `az://` through obstore. Does not retry calls (`Retrying` does), only
    parts of large ones."""

    def __init__(self, url: str, environ: Mapping[str, str], **options: Any):
        if obstore is None:
            raise Unfit("it is not installed (pip install obstore)")
        self.url = url
        scheme, _, rest = url.partition("://")
        bucket, _, prefix = rest.partition("/")
        self._bucket, self._prefix, self._s3 = bucket, prefix, None
        self.puts_at_once, self.reads_at_once = AT_ONCE, SMALL_AT_ONCE
        self._with_strange_keys: set[str] = set()  # folders that obstore cannot list
        self._named = Named(url)
        match scheme:
            case "s3" | "s3a":
                build, self._s3 = _s3(bucket, dict(options), environ)
            case "gs" | "gcs":
                build = _gcs(bucket, dict(options), environ)
            case "az" | "abfs" | "abfss":
                build = _azure(bucket, dict(options), environ)
            case _:
                raise Unfit(f"{scheme}:// is not one of its own")
        timeouts = {
            "timeout": f"{REQUEST_TIMEOUT_S:g}s",
            "connect_timeout": f"{CONNECT_TIMEOUT_S:g}s",
        }
        # http only where the endpoint says so: a server of one's own.
        client: dict[str, Any] = {"allow_http": True, **timeouts}
        once = {"max_retries": 0, "retry_timeout": timedelta(seconds=REQUEST_TIMEOUT_S)}
        again = {"max_retries": PART_RETRIES, "retry_timeout": timedelta(seconds=30.0)}
        with self._answers(""):
            # A conditional write that is repeated unseen would lose against itself.
            self._once = build(prefix=prefix or None, client_options=client, retry_config=once)
            self._parts = build(prefix=prefix or None, client_options=client, retry_config=again)
            reading = {**client, "read_timeout": f"{SILENCE_TIMEOUT_S:g}s"}
            self._reads = build(prefix=prefix or None, client_options=reading, retry_config=again)

    def get(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
        with self._answers(key):
            try:
                if start is None and end is None:
                    return obstore.get(self._once, key).bytes().to_bytes()
                if end is None:
                    return (
                        obstore.get(self._once, key, options={"range": {"offset": start or 0}})
                        .bytes()
                        .to_bytes()
                    )
                if end <= (start or 0):
                    self.size(key)  # NotFound
                    return b""
                return obstore.get_range(self._reads, key, start=start or 0, end=end).to_bytes()
            except errors.BaseError as e:
                if _is_beyond(e):
                    return b""
                raise

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        view = np.frombuffer(buffer, np.uint8)

        def piece(first: int) -> int:
            last = min(first + READ_NBYTES, len(view))
            with self._answers(key):
                try:
                    arrived: Any = obstore.get_range(
                        self._reads, key, start=start + first, end=start + last
                    )
                    found = np.frombuffer(arrived, np.uint8)
                except errors.BaseError as e:
                    if _is_beyond(e):
                        return 0
                    raise
            np.copyto(view[first : first + len(found)], found)  # without Python's lock
            return len(found)

        firsts = range(0, len(view), READ_NBYTES)
        if len(firsts) < 2:
            return sum(map(piece, firsts))
        with ThreadPoolExecutor(min(AT_ONCE, len(firsts)), "read") as pool:
            pieces = [pool.submit(piece, first) for first in firsts]
            try:
                done = 0
                for first, one in zip(firsts, pieces, strict=True):
                    if done == first:  # behind a gap nothing counts
                        done += one.result()
                    else:
                        one.result()
                return done
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise

    def put(self, key: str, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        with self._answers(key):
            if len(view) <= PART_NBYTES:
                obstore.put(self._parts, key, view, use_multipart=False)
            else:
                part = max(PART_NBYTES, -(-len(view) // MAX_PARTS))
                obstore.put(
                    self._parts,
                    key,
                    view,
                    use_multipart=True,
                    chunk_size=part,
                    max_concurrency=self.puts_at_once,
                )

    def create(self, key: str, data: bytes | memoryview) -> bool:
        with self._answers(key):
            try:
                obstore.put(self._once, key, memoryview(data).cast("B"), mode="create")
            except (errors.AlreadyExistsError, errors.PreconditionError) as e:
                # S3's 409: somebody else is at it; try again
                if "ConditionalRequestConflict" in str(e):
                    raise StoreUnavailable(f"{self.url}/{key}: {_short(e)}") from e
                return False
            return True

    def list(self, prefix: str) -> list[str]:
        folder = prefix.rpartition("/")[0]
        with self._answers(prefix):
            if folder not in self._with_strange_keys:
                try:
                    found = obstore.list(self._once, folder or None, chunk_size=1000).collect()
                    return sorted(one["path"] for one in found if one["path"].startswith(prefix))
                except errors.InvalidPathError as e:
                    # one key that obstore cannot name, such as a//b, costs the whole page
                    if self._s3 is None:
                        hint = "delete that object, or set STORAGE_BACKEND=fsspec"
                        raise StoreError(
                            f"{self.url}/{prefix}: wanted keys that can be listed, found one: "
                            f"{_short(e)}; {hint}"
                        ) from e
                    self._with_strange_keys.add(folder)
            keys = list_s3_keys(
                self._client.list_objects_v2,
                self._bucket,
                self._prefix + "/" if self._prefix else "",
                prefix,
            )
        return sorted(self._named(keys))

    def delete(self, key: str) -> None:
        with contextlib.suppress(NotFound), self._answers(key):
            obstore.delete(self._once, key)

    def size(self, key: str) -> int:
        with self._answers(key):
            return int(obstore.head(self._once, key)["size"])

    def abort_stale_uploads(self, older_than_s: float) -> Keys:
        """S3 only (obstore has no call for it, botocore does). On GCS set a lifecycle rule;
        Azure drops blocks by itself."""
        if self._s3 is None:
            return []
        with self._answers(""):
            client = self._client
            return abort_s3_uploads(
                lambda operation, **arguments: getattr(client, operation)(**arguments),
                self._bucket,
                self._prefix + "/" if self._prefix else "",
                older_than_s,
            )

    @functools.cached_property
    def _client(self) -> Any:
        """botocore's, for what obstore cannot do."""
        assert self._s3 is not None
        return self._s3()

    @contextlib.contextmanager
    def _answers(self, key: str) -> Iterator[None]:
        where = f"{self.url}/{key}"
        try:
            yield
        except StoreError:
            raise
        except FileNotFoundError as e:
            raise _not_found(where, str(e)) from e
        except (errors.PermissionDeniedError, errors.UnauthenticatedError) as e:
            if NO_CREDENTIALS in str(e):
                raise StoreRefused(f"{where}: {NO_CREDENTIALS}") from e
            raise denied(where, _short(e)) from e
        except errors.BaseError as e:
            raise _error(where, e) from e
        except Exception as e:
            # of credential providers and of botocore; each has a tree of its own, and none may leak
            raise _error(where, e) from e


def _not_found(where: str, text: str) -> StoreError:
    codes = set(re.findall(r"<Code>(\w+)</Code>", text))
    if (
        codes & {"NoSuchBucket", "ContainerNotFound"}
        or "The specified bucket does not exist" in text
    ):
        return no_bucket(where)
    if "NoSuchUpload" in codes:  # somebody aborted it; it can be begun again
        return StoreUnavailable(f"{where}: the upload was aborted by others")
    return NotFound(where)


def _error(where: str, e: Exception) -> StoreError:
    text = str(e)
    if "NoSuchBucket" in text or "ContainerNotFound" in text:
        return no_bucket(where)
    if any(word in text for word in FULL):
        return full(where, _short(e))
    if (
        type(e).__name__ in ("NoCredentialsError", "PartialCredentialsError")
        or "must be specified" in text
        or _is_without_identity(text)
    ):
        return no_credentials(where, _short(e))
    if (
        "PermanentRedirect" in text
        or "AuthorizationHeaderMalformed" in text
        or "redirect without LOCATION" in text
    ):
        return StoreRefused(
            f"{where}: the bucket is in another region ({_short(e)}); set AWS_REGION to the "
            "bucket's"
        )
    return StoreUnavailable(f"{where}: {_short(e)}")


def _is_without_identity(text: str) -> bool:
    """Was a machine's metadata server asked for credentials, where there is none (or none for
    us)? One that has trouble says 5xx."""
    asked = "169.254.169.254" in text or "metadata.google.internal" in text
    return asked and not re.search(r"status code: (5\d\d|429)", text)


def _is_beyond(e: Exception) -> bool:
    """The object ends before the range begins."""
    return "416 " in str(e) or "InvalidRange" in str(e)


def _short(e: Exception) -> str:
    """obstore appends pages of debugging, and addresses may carry signatures."""
    return re.sub(r"\?\S+", "?...", " ".join(str(e).partition("\n\nDebug source")[0].split()))[:600]


# ---- S3 ------------------------------------------------------------------------------------------
Build = Callable[..., Any]


def _s3(
    bucket: str, options: dict[str, Any], environ: Mapping[str, str]
) -> tuple[Build, Callable[[], Any]]:
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
        raise Unfit("profiles need botocore (pip install botocore)")
    if endpoint:
        config |= {"endpoint": endpoint, "region": region or "us-east-1"}
    elif str(region).startswith("cn-"):
        raise Unfit("regions of another partition have other addresses")
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
def _gcs(bucket: str, options: dict[str, Any], environ: Mapping[str, str]) -> Build:
    token, endpoint = options.pop("token", None), options.pop("endpoint_url", None)
    options.pop("project", None)  # of use only to who makes buckets
    _none_left(options)
    if environ.get("STORAGE_EMULATOR_HOST"):
        raise Unfit(
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
        raise Unfit(
            f"token={token if isinstance(token, str) else type(token).__name__!r} is for gcsfs"
        )
    return lambda **arguments: stores.GCSStore(
        bucket, config=config, credential_provider=provider, **arguments
    )


def _anybody() -> dict[str, Any]:
    return {"token": "anonymous", "expires_at": None}


# ---- Azure ---------------------------------------------------------------------------------------
def _azure(container: str, options: dict[str, Any], environ: Mapping[str, str]) -> Build:
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
        raise Unfit(f"it has no such option: {', '.join(sorted(options))}")
