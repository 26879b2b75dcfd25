from __future__ import annotations

import re

from runs import REPOSITORY

README = (REPOSITORY / "README.md").read_text()


def code_after(marker: str) -> str:
    return re.search(rf"<!-- {marker} -->\n```\w+\n(.*?)```", README, re.DOTALL).group(1)


def test_the_five_lines_train_and_test(in_folder):
    code = code_after("five lines").replace("max_epochs=5", 'max_epochs=1, accelerator="cpu"')
    assert "max_epochs=1" in code
    lines = [line for line in code.splitlines() if line and not line.startswith(("from", "import"))]
    assert len(lines) <= 5
    names: dict[str, object] = {}
    exec(code, names)
    assert float(names["trainer"].callback_metrics["test/acc"]) > 0.05
