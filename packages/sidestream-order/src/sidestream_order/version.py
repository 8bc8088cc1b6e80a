"""The version of this package, and of `sidestream`, which needs the same one."""

from __future__ import annotations

VERSION = "0.1.0"
