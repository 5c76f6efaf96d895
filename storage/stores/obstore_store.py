"""Access to buckets through obstore (Rust): large buffers are sent and received in parallel parts,
without copies and without holding the GIL.

Supports s3://, gs:// and az://. A store must be opened in the process that uses it, not before a
fork. Raises `ObstoreUnusable` where obstore cannot be used (`storage/stores/obstore_store.py`);
`open_store` then uses fsspec.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np

from storage.errors import NotFound, StoreError, StoreRefused, StoreUnavailable
from storage.stores.bounded_store import CallWaits
from storage.stores.fsspec_store import (
    FULL,
    KeyFilter,
    abort_s3_uploads,
    denied,
    full,
    is_ours,
    list_s3_keys,
    no_bucket,
    no_credentials,
)
from storage.stores.objects import Gate, Keys, all_of, folders_of

# obstore's clients for S3, GCS and Azure, configured from what the clouds' own tools read.

try:
    from obstore import store as _stores

    stores: Any = _stores
except ImportError:
    pass  # `FastStore` raises ObstoreUnusable

REGION_TIMEOUT_S = 5.0
NO_CREDENTIALS = (
    "no credentials found; log in the way your cloud's own tools do (aws configure, aws sso login)"
)


class ObstoreUnusable(Exception):
    """obstore is not installed, or does not support a requested setting."""


# ---- S3 ------------------------------------------------------------------------------------------
MakeClient = Callable[..., Any]


def s3_client(
    bucket: str, options: dict[str, Any], environ: Mapping[str, str]
) -> tuple[MakeClient, Callable[[], Any]]:
    """Return a function that builds obstore's store, and one that returns a botocore client for
    what obstore cannot do."""
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
    # TLS already protects the content; hashing it again for the signature costs as much as sending
    # it.
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
    """Return the `endpoint_url` of the profile in use; botocore itself reads it only for its own
    clients."""
    # ProfileNotFound and broken files: a later request for credentials reports these better
    with contextlib.suppress(Exception):
        found = session.get_scoped_config().get("endpoint_url")
        return str(found) if found else None
    return None


class _ByBotocore:
    """A provider of botocore's credentials, which obstore calls when needed and again before they
    expire."""

    ttl = timedelta(minutes=10)  # botocore renews credentials 15 minutes before they expire

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
    """Return the region of a bucket, which S3 reports to anybody; None: no answer. A node is often
    in another region than its bucket."""
    if bucket not in _regions:
        request = urllib.request.Request(f"https://s3.amazonaws.com/{bucket}", method="HEAD")
        try:
            with urllib.request.urlopen(request, timeout=REGION_TIMEOUT_S) as answer:
                headers = answer.headers
        except urllib.error.HTTPError as e:  # the header is also in 301, 403 and 404
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
    options.pop("project", None)  # needed only to create buckets
    _none_left(options)
    if environ.get("STORAGE_EMULATOR_HOST"):
        raise ObstoreUnusable(
            "emulators (STORAGE_EMULATOR_HOST) speak Google's JSON interface, obstore the XML one"
        )
    config: dict[str, Any] = {"base_url": endpoint} if endpoint else {}
    provider = None
    if token == "anon":
        # Without it obstore would still request a token to write; a server that needs none gets a
        # dummy.
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
    # variables as `az` spells them
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
        config["use_azure_cli"] = True  # a personal computer after `az login`
    return lambda **arguments: stores.AzureStore(container, config=config, **arguments)


def _none_left(options: Mapping[str, Any]) -> None:
    if options:
        raise ObstoreUnusable(f"it has no such option: {', '.join(sorted(options))}")


try:
    import obstore
    from obstore import exceptions as errors
except ImportError:
    obstore = None  # type: ignore[assignment]

PART_NBYTES = 16 << 20  # part of an upload
PACED_NBYTES = 5 << 20  # part of a paced upload: the least that S3 accepts
READ_NBYTES = 8 << 20  # one range of a parallel read
AT_ONCE = 8  # parallel requests of one call
# parallel requests of all writing calls, per processor: more only compete
WRITES_PER_PROCESSOR = 4
SMALL_AT_ONCE = 32  # small objects that `get_each` reads at once
MAX_PARTS = 9000  # S3 allows 10000
REQUEST_TIMEOUT_S = 300.0  # seconds for one request: a part at 430 kB/s, with `AT_ONCE` under way
CONNECT_TIMEOUT_S = 10.0
SILENCE_TIMEOUT_S = 60.0  # seconds without data in a read
PART_RETRIES = 3  # retries of one part: a lost connection must not cost the whole object


class FastStore:
    """A store on `s3://`, `gs://` or `az://` through obstore. Does not retry calls (`Retrying`
    does), only parts of large ones."""

    def __init__(self, url: str, environ: Mapping[str, str], **options: Any):
        if obstore is None:
            raise ObstoreUnusable("it is not installed (pip install obstore)")
        self.url = url
        scheme, _, rest = url.partition("://")
        bucket, _, prefix = rest.partition("/")
        self._bucket, self._prefix, self._s3 = bucket, prefix, None
        self.bounds = CallWaits(url)  # of the pieces of large reads; see `Bounded`
        self.reads_at_once = SMALL_AT_ONCE
        self._writes_at_once = max(AT_ONCE, WRITES_PER_PROCESSOR * (os.cpu_count() or AT_ONCE))
        self._writing, self._lock = 0, threading.Lock()  # writing calls under way
        self._with_strange_keys: set[str] = set()  # folders that obstore cannot list
        self._named = KeyFilter(url)
        match scheme:
            case "s3" | "s3a":
                build, self._s3 = s3_client(bucket, dict(options), environ)
            case "gs" | "gcs":
                build = gcs_client(bucket, dict(options), environ)
            case "az" | "abfs" | "abfss":
                build = azure_client(bucket, dict(options), environ)
            case _:
                raise ObstoreUnusable(f"{scheme}:// is not one of its own")
        timeouts = {
            "timeout": f"{REQUEST_TIMEOUT_S:g}s",
            "connect_timeout": f"{CONNECT_TIMEOUT_S:g}s",
        }
        # plain http only where the endpoint says so: a private server
        client: dict[str, Any] = {"allow_http": True, **timeouts}
        once = {"max_retries": 0, "retry_timeout": timedelta(seconds=REQUEST_TIMEOUT_S)}
        again = {"max_retries": PART_RETRIES, "retry_timeout": timedelta(seconds=30.0)}
        with self._answers(""):
            # A conditional write that is silently repeated would lose against itself.
            self._once = build(prefix=prefix or None, client_options=client, retry_config=once)
            self._parts = build(prefix=prefix or None, client_options=client, retry_config=again)
            reading = {**client, "read_timeout": f"{SILENCE_TIMEOUT_S:g}s"}
            self._reads = build(prefix=prefix or None, client_options=reading, retry_config=again)

    def get(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
        with self._answers(key):
            try:
                if end is None:
                    # also from the beginning, since the answer to a range tells the whole size
                    first = start or 0
                    answer = obstore.get(self._once, key, options={"range": {"offset": first}})
                    data, size = answer.bytes().to_bytes(), answer.meta["size"]
                    return all_of(f"{self.url}/{key}", data, size - first)
                if end <= (start or 0):
                    self.size(key)  # raises NotFound if there is none
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
                    arrived: Any = self.bounds.call(
                        key,
                        last - first,
                        lambda: obstore.get_range(
                            self._reads, key, start=start + first, end=start + last
                        ),
                    )
                    found = np.frombuffer(arrived, np.uint8)
                except errors.BaseError as e:
                    if _is_beyond(e):
                        return 0
                    raise
            np.copyto(view[first : first + len(found)], found)  # without holding the GIL
            return len(found)

        firsts = range(0, len(view), READ_NBYTES)
        if len(firsts) < 2:
            return sum(map(piece, firsts))
        with ThreadPoolExecutor(min(AT_ONCE, len(firsts)), "read") as pool:
            pieces = [pool.submit(piece, first) for first in firsts]
            try:
                done = 0
                for first, one in zip(firsts, pieces, strict=True):
                    if done == first:  # bytes behind a gap do not count
                        done += one.result()
                    else:
                        one.result()
                return done
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise

    def put(self, key: str, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        with self._answers(key), self._share() as at_once:
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
                    max_concurrency=at_once,
                )

    def put_paced(self, key: str, data: bytes | memoryview, gate: Gate) -> None:
        """Write in pieces, each the least that S3 accepts; a request is sent when one is full."""
        view = memoryview(data).cast("B")
        if len(view) <= PACED_NBYTES:
            gate(len(view))
            self.put(key, view)
            return
        piece = max(PACED_NBYTES, -(-len(view) // MAX_PARTS))
        with (
            self._answers(key),  # an error inside aborts the upload
            self._share() as at_once,
            obstore.open_writer(
                self._parts, key, buffer_size=piece, max_concurrency=at_once
            ) as writer,
        ):
            for start in range(0, len(view), piece):
                some = view[start : start + piece]
                gate(len(some))
                writer.write(some)

    @contextlib.contextmanager
    def _share(self) -> Iterator[int]:
        """Yield how many requests a writing call may have under way, given the other calls."""
        with self._lock:
            self._writing += 1
            at_once = max(2, min(AT_ONCE, self._writes_at_once // self._writing))
        try:
            yield at_once
        finally:
            with self._lock:
                self._writing -= 1

    def create(self, key: str, data: bytes | memoryview) -> bool:
        with self._answers(key):
            try:
                obstore.put(self._once, key, memoryview(data).cast("B"), mode="create")
            except (errors.AlreadyExistsError, errors.PreconditionError) as e:
                # S3's 409: somebody else is writing; try again
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
                    # one key that obstore cannot name, such as a//b, fails the whole page
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

    def folders(self) -> Keys:
        with self._answers(""):
            try:
                found = obstore.list_with_delimiter(self._once, None)["common_prefixes"]
            except errors.InvalidPathError:  # see `list`
                return folders_of(self.list(""))
        return sorted(str(path).rstrip("/").rpartition("/")[2] for path in found)

    def delete(self, key: str) -> None:
        with contextlib.suppress(NotFound), self._answers(key):
            obstore.delete(self._once, key)

    def size(self, key: str) -> int:
        with self._answers(key):
            return int(obstore.head(self._once, key)["size"])

    def abort_stale_uploads(self, older_than_s: float) -> Keys:
        """Abort stale uploads on S3, through botocore, as obstore has no call for it; return their
        keys. On GCS set a lifecycle rule; Azure drops blocks itself."""
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
        """A botocore client for what obstore cannot do."""
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
            # errors of credential providers and of botocore have their own classes, none of which
            # may leak
            if is_ours(e) and not isinstance(e, OSError):
                raise
            raise _error(where, e) from e


def _not_found(where: str, text: str) -> StoreError:
    codes = set(re.findall(r"<Code>(\w+)</Code>", text))
    if (
        codes & {"NoSuchBucket", "ContainerNotFound"}
        or "The specified bucket does not exist" in text
    ):
        return no_bucket(where)
    if "NoSuchUpload" in codes:  # somebody aborted it; it can be started again
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
    if _status_of(e) in (401, 403):  # obstore has no class of its own for a listing that is denied
        return denied(where, _short(e))
    return StoreUnavailable(f"{where}: {_short(e)}")


def _status_of(e: Exception) -> int:
    """Return the HTTP status in an error of obstore or botocore; 0 if the store gave none."""
    answer = getattr(e, "response", None)  # botocore's
    if isinstance(answer, dict):
        return int(answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    found = re.search(r"status code: (\d{3})\b", str(e))
    return int(found[1]) if found else 0


def _is_without_identity(text: str) -> bool:
    """Return whether credentials were requested from a machine's metadata server where there is
    none (or none for us). A server with problems answers 5xx."""
    asked = "169.254.169.254" in text or "metadata.google.internal" in text
    return asked and not re.search(r"status code: (5\d\d|429)", text)


def _is_beyond(e: Exception) -> bool:
    """Return whether the object ends before the range begins."""
    return "416 " in str(e) or "InvalidRange" in str(e)


def _short(e: Exception) -> str:
    """Return the error without obstore's pages of debugging and without URL queries, which may
    carry signatures."""
    return re.sub(r"\?\S+", "?...", " ".join(str(e).partition("\n\nDebug source")[0].split()))[:600]
