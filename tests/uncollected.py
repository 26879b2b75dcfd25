"""Collects no garbage in the server that processes are forked from: its imports take a tenth less time."""

from __future__ import annotations

import gc

gc.disable()
