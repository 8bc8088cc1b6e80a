"""The version of this package. `sidestream` has and needs the same version."""

from __future__ import annotations

VERSION = "0.1.0"
