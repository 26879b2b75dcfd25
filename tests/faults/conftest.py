"""Runs that nobody disturbs, trained once for all files."""

from pathlib import Path
from typing import Any

import harness
import pytest


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that nothing disturbed, to be copied."""
    folder = tmp_path_factory.mktemp("whole")
    assert harness.fit(folder) == 0, harness.log(folder)
    return folder


@pytest.fixture(scope="session")
def whole(finished: Path) -> dict[str, Any]:
    """Its outcome."""
    return harness.outcome(finished)


@pytest.fixture(scope="session")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that was killed after 13 steps, to be copied."""
    folder = tmp_path_factory.mktemp("killed")
    assert harness.fit(folder, fault="0:13:batch_start:KILL") == -9, harness.log(folder)
    return folder
