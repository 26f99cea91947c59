"""Another user of this machine, for tests that run as root."""

from __future__ import annotations

import os

import pytest

ANOTHER_USER = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
