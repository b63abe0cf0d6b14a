"""The address of a server, in configurations."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator


def _check(address: str) -> str:
    if not address.startswith(("http://", "https://")):
        raise ValueError("must begin with http:// or https://")
    if not re.fullmatch(r"https?://[^\s?#]+", address):
        raise ValueError("must be an address without query, fragment or white space, e.g. http://127.0.0.1:8000")
    return address


HttpAddress = Annotated[str, AfterValidator(_check)]
"""`http://host:port/path`, to which paths are appended."""
