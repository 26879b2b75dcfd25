from __future__ import annotations

import platform

from vit_lightning.storage.redaction import Redaction


def test_names_are_replaced_in_paths_and_addresses_alone(monkeypatch):
    for name, value in {
        "LOGNAME": "jane",
        "HOME": "/home/jane",
        "MY_TOKEN": "a secret text",
        "DB": "p://u:hunter@h/d",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(platform, "node", lambda: "gpu7.lab.org")
    redacted = Redaction()
    for text, expected in {
        "/home/jane/data": "~/data",
        "/mnt/jane_work/my_jane/jane2": "/mnt/USER_work/my_USER/jane2",
        "jane@gpu7.lab.org:/gpu7_disk": "USER@HOST:/HOST_disk",
        "the class jane of gpu7": "the class jane of gpu7",
        "it is a secret text.": "it is ***.",
        "as hunter": "as ***",
        "https://jane:pw@host/x": "https://host/x",
    }.items():
        assert redacted(text) == expected
    assert redacted.of({"api_key": "x", "root": ["/home/jane", 1]}) == {"api_key": "***", "root": ["~", 1]}
