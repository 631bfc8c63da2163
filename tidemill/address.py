"""Addresses of servers in settings: what forms they may have."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from tidemill.errors import ConfigError

if TYPE_CHECKING:
    from tidemill.config import RunConfig

SERVER = "http(s)://HOST[:PORT]"
TRACKING = (
    f"{SERVER} of an MLflow server, databricks or databricks://PROFILE, sqlite:///FILE, or the postgresql://, mysql:// "
    "or mssql:// address of a database of MLflow's"
)
PLACES = re.compile(r"databricks(://\S+)?|sqlite:///.+|(postgresql|mysql|mssql)(\+\w+)?://\S+")
"""What MLflow writes to besides a server; it writes to plain folders no more."""
STORED = re.compile(r"s3://[^/\s]+/.*[^/\s].*")
PAGES = ("ray", "mlflow", "store")
"""What `kubernetes.pages` may give the address of."""


def addresses(config: RunConfig) -> Iterator[ConfigError]:
    """Addresses that no server can have."""
    tracking, endpoint = config.tracking.uri, config.store.endpoint
    if config.model.startswith("s3:") and not STORED.fullmatch(config.model):
        yield ConfigError("model", config.model, "s3://BUCKET/PREFIX, for one of the store", "Mend it.")
    if tracking is not None and not is_tracking(tracking):
        yield ConfigError("tracking.uri", tracking, f"{TRACKING}; or null", "Mend it, or leave it out.")
    if endpoint != "embedded" and not is_server(endpoint, bare=True):
        fix = "Mend it; the bucket is a setting of its own, store.bucket."
        yield ConfigError("store.endpoint", endpoint, f"embedded, or {SERVER} of an S3 server", fix)
    for name, page in config.kubernetes.pages.items():
        key = f"kubernetes.pages.{name}"
        if name not in PAGES:
            yield ConfigError(key, page, f"one of the keys {', '.join(PAGES)}", "Remove it or mend the spelling.")
        if not is_server(page):
            yield ConfigError(key, page, f"{SERVER}, with a path if need be", "Give what a browser opens.")


def is_server(address: str, *, bare: bool = False) -> bool:
    """Whether this is `http(s)://host[:port]`; `bare` allows neither a path nor a user's name with it."""
    try:
        url = urlsplit(address)
        port = url.port
    except ValueError:
        return False
    if url.scheme not in ("http", "https") or not url.hostname or port == 0 or re.search(r"[\s\\]", address):
        return False
    return not bare or (url.path in ("", "/") and not url.query and not url.fragment and not url.username)


def is_tracking(address: str) -> bool:
    """Whether MLflow can be told to track there."""
    return is_server(address) or PLACES.fullmatch(address) is not None
