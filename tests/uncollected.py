"""Collects no garbage in the server that processes are forked from: its imports take a tenth less time."""

import gc

gc.disable()
