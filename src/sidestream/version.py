"""The version of this package, for what is written to files and shown."""

from __future__ import annotations

VERSION = "0.1.0"
