"""Addresses of servers in settings: what forms they may have."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from tidemill.errors import ConfigError

if TYPE_CHECKING:  # the help of a command needs forms of addresses, and no settings
    from tidemill.config.data import DataConfig
    from tidemill.config.kubernetes import KubernetesConfig
    from tidemill.config.storage import StoreConfig, TrackingConfig

SERVER = "http(s)://HOST[:PORT]"
TRACKING = (
    f"{SERVER} of an MLflow server, databricks or databricks://PROFILE, sqlite:///FILE, or the postgresql://, mysql:// "
    "or mssql:// address of a database of MLflow's"
)
PLACES = re.compile(r"databricks(://\S+)?|sqlite:///.+|(postgresql|mysql|mssql)(\+\w+)?://\S+")
"""What MLflow writes to besides a server; it writes to plain folders no more."""
HUB_TOKEN = re.compile(r"(hf://.*[?&]token=)[^&]*")
STORED = re.compile(r"s3://[^/\s]+/.*[^/\s].*")
CREDENTIALS = re.compile(r"//[^/]*@")
PASSWORD = re.compile(r"([^:/]+://[^/]*:)[^/]*(?=@)|(.*[?&](?:password|passwd|pwd)=)[^&]*", re.IGNORECASE)
"""One in an address, and what stands before it. Settings are stored, shown and handed on; whoever reads them has it."""
PAGES = ("ray", "mlflow", "store")
"""What `kubernetes.pages` may give the address of."""


def model_address(model: str) -> Iterator[ConfigError]:
    """A model of the object store at no possible place."""
    if model.startswith("s3:") and not STORED.fullmatch(model):
        yield ConfigError("model", model, "s3://BUCKET/PREFIX, for one of the store", "Mend it.")


def hub_addresses(data: DataConfig) -> Iterator[ConfigError]:
    """A data set with the token that opens it."""
    for name, source in (("train", data.train), ("held_out", data.held_out)):
        if source is not None and HUB_TOKEN.match(source):
            fix = (
                "Settings are stored and shown. Set HF_TOKEN; pods get it from a secret that kubernetes.secrets names."
            )
            yield ConfigError(f"data.{name}", HUB_TOKEN.sub(r"\1(not shown)", source), "a source without a token", fix)


def server_addresses(tracking: TrackingConfig, store: StoreConfig) -> Iterator[ConfigError]:
    """Addresses that no server can have."""
    if tracking.uri is not None and PASSWORD.match(tracking.uri):
        fix = (
            "Settings are stored and shown. Set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD for a server; a "
            "database's driver has a place of its own, such as PGPASSWORD."
        )
        yield ConfigError("tracking.uri", without_password(tracking.uri), "an address without a password", fix)
    elif tracking.uri is not None and not is_tracking(tracking.uri):
        yield ConfigError("tracking.uri", tracking.uri, f"{TRACKING}; or null", "Mend it, or leave it out.")
    if store.endpoint != "embedded" and not is_server(store.endpoint, bare=True):
        fix = "Mend it; the bucket is a setting of its own, store.bucket, and the keys come from the environment."
        shown = CREDENTIALS.sub("//(not shown)@", store.endpoint)
        yield ConfigError("store.endpoint", shown, f"embedded, or {SERVER} of an S3 server", fix)


def page_addresses(kubernetes: KubernetesConfig) -> Iterator[ConfigError]:
    """Pages that no browser opens, or that nothing links to."""
    for name, page in kubernetes.pages.items():
        key = f"kubernetes.pages.{name}"
        if name not in PAGES:
            yield ConfigError(key, page, f"one of the keys {', '.join(PAGES)}", "Remove it or mend the spelling.")
        if PASSWORD.match(page):
            fix = "Pages are shown to all who see the run. Let the server ask for it."
            yield ConfigError(key, without_password(page), "an address without a password", fix)
        elif not is_server(page):
            yield ConfigError(key, page, f"{SERVER}, with a path if need be", "Give what a browser opens.")


def without_password(address: str) -> str:
    """An address as it may be shown."""
    return PASSWORD.sub(lambda found: f"{found[1] or found[2]}(not shown)", address)


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
