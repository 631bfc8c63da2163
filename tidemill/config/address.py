"""The forms that addresses of servers may have in settings, and how they are shown."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

SERVER = "http(s)://HOST[:PORT]"
TRACKING = (
    f"{SERVER} of an MLflow server, databricks or databricks://PROFILE, sqlite:///FILE, or the postgresql://, mysql:// "
    "or mssql:// address of an MLflow database"
)
TRACKING_STORES = re.compile(r"databricks(://\S+)?|sqlite:///.+|(postgresql|mysql|mssql)(\+\w+)?://\S+")
"""Where MLflow writes besides a server; it no longer supports plain folders."""
MODEL_PREFIX = re.compile(r"s3://[^/\s]+/.*[^/\s].*")
HUB_TOKEN = re.compile(r"(hf://.*[?&]token=)[^&]*")
CREDENTIALS = re.compile(r"//[^/]*@")
PASSWORD = re.compile(r"([^:/]+://[^/]*:)[^/]*(?=@)|(.*[?&](?:password|passwd|pwd)=)[^&]*", re.IGNORECASE)
"""A password in an address, and what precedes it. Settings are stored, shown and passed on, so they must hold none."""


def without_password(address: str) -> str:
    """An address as it may be shown."""
    return PASSWORD.sub(lambda found: f"{found[1] or found[2]}(not shown)", address)


def is_server(address: str, *, bare: bool = False) -> bool:
    """Whether this is `http(s)://host[:port]`; `bare` allows neither a path nor a user name."""
    try:
        url = urlsplit(address)
        port = url.port
    except ValueError:
        return False
    if url.scheme not in ("http", "https") or not url.hostname or port == 0 or re.search(r"[\s\\]", address):
        return False
    return not bare or (url.path in ("", "/") and not url.query and not url.fragment and not url.username)


def is_tracking(address: str) -> bool:
    """Whether MLflow can track to this address."""
    return is_server(address) or TRACKING_STORES.fullmatch(address) is not None
