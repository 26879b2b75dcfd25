"""A server that answers as W&B's does to wandb 0.31, on this machine, and can hang, refuse and die."""

import contextlib
import json
import re
import struct
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

ALWAYS: dict[str, dict[str, Any]] = {
    "RunStoppedStatus": {"project": {"run": {"stopped": False}}},
    "GetProjects": {"models": {"edges": [], "pageInfo": {"endCursor": None, "hasNextPage": False}}},
    "ProjectInternalId": {"project": {"id": "p", "internalId": "1"}},
    "ArtifactType": {"project": {"artifact": None}},
    "FetchArtifactDigestAlgorithm": {"project": {"artifactType": None}},
    "XXHashDigestsEnabled": {"entity": {"xxhashDigestsEnabled": False}},
    "NotifyScriptableRunAlert": {"notifyScriptableRunAlert": {"success": True}},
}
"""What is answered whatever is asked."""


class StubServer(ThreadingHTTPServer):
    """Keeps what it is sent: ``rows`` by line, ``config``, ``summary``, ``files``; its mode is ok, hang or a status."""

    daemon_threads = True

    def __init__(self, mode: str = "ok") -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.mode = mode
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.runs: dict[str, dict[str, Any]] = {}
        self.rows: dict[int, dict[str, Any]] = {}
        self.summary: dict[str, Any] = {}
        self.files: dict[str, bytes] = {}
        self.views: dict[str, dict[str, Any]] = {}
        self.operations: list[str] = []
        self.artifacts: list[dict[str, Any]] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def config(self) -> dict[str, Any]:
        config = json.loads(next(reversed(self.runs.values()))["config"])
        return {key: entry["value"] for key, entry in config.items() if key != "_wandb"}

    def die(self) -> None:
        """Later connections are refused, open ones get no answer."""
        self.mode = "hang"
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: StubServer

    def log_message(self, *_: Any) -> None:
        pass

    def handle(self) -> None:
        with contextlib.suppress(OSError):  # the client has gone
            super().handle()

    def reply(self, value: Any, status: int = 200) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def answer(self) -> None:
        server = self.server
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        while server.mode == "hang":
            time.sleep(0.1)
        if server.mode != "ok":
            self.reply({"error": "stub"}, int(server.mode))
        elif self.path == "/graphql":
            self.reply({"data": self.graphql(json.loads(body))})
        elif self.path.endswith("/file_stream"):
            self.keep(json.loads(body))
            self.reply({"limits": {}})
        else:
            if self.path.startswith("/upload/"):
                server.files[self.path.removeprefix("/upload/")] = body
            self.reply({})

    do_GET = do_POST = do_PUT = do_HEAD = answer

    def graphql(self, request: dict[str, Any]) -> dict[str, Any]:
        server, given = self.server, request.get("variables") or {}
        name = request.get("operationName") or re.search(r"(?:query|mutation)\s+(\w+)", request["query"])[1]
        server.operations.append(name)
        if name in ALWAYS:
            return ALWAYS[name]
        project = {"id": "p", "name": given.get("project", "p"), "entity": {"id": "e", "name": "me"}}
        if name == "UpsertBucket":
            new = given["name"] not in server.runs
            server.runs.setdefault(given["name"], {}).update({k: v for k, v in given.items() if v is not None})
            bucket = {"id": "b", "name": given["name"], "displayName": given.get("displayName"), "description": None}
            bucket |= {"config": "{}", "sweepName": None, "project": project, "historyLineCount": len(server.rows)}
            return {"upsertBucket": {"bucket": bucket, "inserted": new}}
        if name == "RunResumeStatus":
            return {"model": {**project, "bucket": self.known_run(given.get("name", ""))}}
        if name == "CreateRunFiles":
            files = [{"name": file, "uploadUrl": f"{server.url}/upload/{file}"} for file in given["files"]]
            return {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": files}}
        if name.lower().startswith("upsertview"):
            server.views[given["displayName"]] = json.loads(given["spec"])
            view = {"id": "v", "name": given["name"], "type": given["type"], "displayName": given["displayName"]}
            view |= {"description": "", "project": {**project, "entityName": "me"}, "spec": given["spec"]}
            return {"upsertView": {"view": {**view, "updatedAt": "2026-01-01T00:00:00"}, "inserted": True}}
        if (found := self.of_artifact(name, given)) is not None:
            return found
        if "Viewer" in name or name == "GetDefaultEntity":
            viewer = {"id": "u", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}
            return {"viewer": viewer}
        return {"serverInfo": {"features": [], "cliVersionInfo": {}, "latestLocalVersionInfo": None}}

    def of_artifact(self, name: str, given: dict[str, Any]) -> dict[str, Any] | None:
        server, asked = self.server, given.get("input") or given
        if name == "CreateArtifact":
            number = str(len(server.artifacts))
            server.artifacts.append({**asked, "id": number, "files": {}})
            made = {"id": number, "state": "PENDING", "artifactSequence": {"latestArtifact": None}}
            return {"createArtifact": {"artifact": made}}
        if name in ("CreateArtifactManifest", "UpdateArtifactManifest"):
            url = f"{server.url}/upload/{asked.get('artifactID', '')}/{asked.get('name', 'wandb_manifest.json')}"
            made = {"id": asked.get("artifactID", asked.get("artifactManifestID"))}
            file = {"id": "f", "name": "m", "displayName": "m", "uploadUrl": url, "uploadHeaders": []}
            return {name[0].lower() + name[1:]: {"artifactManifest": {**made, "file": file}}}
        if name == "CreateArtifactFiles":
            edges = []
            for file in asked["artifactFiles"]:
                place = f"{file['artifactID']}/{file['name']}"
                node = {"id": place, "name": file["name"], "displayName": file["name"], "uploadHeaders": []}
                node |= {"storagePath": place, "uploadUrl": f"{server.url}/upload/{place}", "uploadMultipartUrls": None}
                edges.append({"node": {**node, "artifact": {"id": file["artifactID"]}}})
            return {"createArtifactFiles": {"files": {"edges": edges}}}
        if name == "CommitArtifact":
            found = server.artifacts[int(asked["artifactID"])]
            return {"commitArtifact": {"artifact": {"id": found["id"], "digest": found["digest"]}}}
        if name == "ArtifactByID":
            return {"artifact": self.artifact(int(asked["id"]))}
        return None

    def artifact(self, number: int) -> dict[str, Any]:
        sent = self.server.artifacts[number]
        project = {"name": sent["projectName"], "entity": {"name": "me", "__typename": "Entity"}}
        sequence = {"__typename": "ArtifactSequence", "name": sent["artifactCollectionName"]}
        sequence["project"] = {"__typename": "Project", "id": "p", "internalId": "1", **project}
        facts = dict.fromkeys(("description", "historyStep", "updatedAt"))
        facts |= {"metadata": sent.get("metadata"), "ttlDurationSeconds": -2, "ttlIsInherited": True, "commitHash": "c"}
        facts |= {"tags": [], "aliases": [], "state": "COMMITTED", "size": 5, "digest": sent["digest"], "fileCount": 1}
        facts |= {"createdAt": "2026-01-01T00:00:00"}
        kind = {"__typename": "Artifact", "id": str(number), "artifactType": {"name": sent["artifactTypeName"]}}
        return {**kind, "artifactSequence": sequence, "versionIndex": number, **facts}

    def known_run(self, name: str) -> dict[str, Any] | None:
        server = self.server
        if name not in server.runs:
            return None
        tail = [json.dumps(row) for row in list(server.rows.values())[-1:]]
        counts = {"historyLineCount": len(server.rows), "eventsLineCount": 0, "logLineCount": 0}
        told = {"historyTail": json.dumps(tail), "summaryMetrics": json.dumps(server.summary), "eventsTail": "[]"}
        config = {"config": server.runs[name].get("config") or "{}", "tags": [], "wandbConfig": '{"t": 1}'}
        return {"id": "b", "name": name, "displayName": None, **counts, **told, **config}

    def keep(self, sent: dict[str, Any]) -> None:
        for name, part in (sent.get("files") or {}).items():
            if name == "wandb-history.jsonl":
                for number, line in enumerate(part["content"]):
                    self.server.rows[part["offset"] + number] = json.loads(line)
            elif name == "wandb-summary.json":
                self.server.summary = json.loads(part["content"][-1])


def read_wandb_file(file: Path) -> dict[str, Any]:
    """Rows, config, summary, console and facts of the run in a ``.wandb`` file."""
    from google.protobuf.json_format import MessageToDict
    from wandb.proto import wandb_internal_pb2

    found: dict[str, Any] = {"rows": [], "config": {}, "summary": {}, "run": {}}
    found |= {"stats": [], "console": "", "metrics": {}, "axes": {}, "artifacts": {}, "environment": {}}
    found["preempting"] = False
    for chunk in _chunks(file.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(chunk)
        kind = record.WhichOneof("record_type")
        if kind == "history":
            found["rows"].append(_items(record.history.item))
        elif kind == "summary":
            found["summary"] |= _items(record.summary.update)
        elif kind == "run":
            run = record.run
            found["run"] = {"id": run.run_id, "name": run.display_name, "group": run.run_group}
            found["run"] |= {"job_type": run.job_type, "tags": list(run.tags), "notes": run.notes}
            found["place"] = f"{run.entity}/{run.project}/{run.run_id}", run.sweep_id
            found["config"] |= _items(run.config.update)
        elif kind == "config":
            _merge(found["config"], _items(record.config.update))
        elif kind == "stats":
            found["stats"].append({item.key: json.loads(item.value_json) for item in record.stats.item})
        elif kind == "output_raw":
            found["console"] += record.output_raw.line
        elif kind == "environment":
            found["environment"] |= MessageToDict(record.environment)
        elif kind == "metric":
            said = MessageToDict(record.metric.summary)
            name = record.metric.name or record.metric.glob_name
            found["metrics"][name] = [way for way in ("max", "min") if said.get(way)]
            found["axes"][name] = record.metric.step_metric
        elif kind == "preempting":
            found["preempting"] = True
        elif kind == "artifact":
            found["artifacts"].setdefault(record.artifact.name, []).append(
                {
                    "type": record.artifact.type,
                    "aliases": list(record.artifact.aliases),
                    "metadata": json.loads(record.artifact.metadata or "{}"),
                    "files": {entry.path: entry.local_path for entry in record.artifact.manifest.contents},
                }
            )
    return found


def _merge(before: dict[str, Any], more: dict[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(before.get(key), dict):
            _merge(before[key], value)
        else:
            before[key] = value


def _items(entries: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for entry in entries:
        *parents, last = list(entry.nested_key) or [entry.key]
        place = found
        for name in parents:
            place = place.setdefault(name, {})
        place[last] = json.loads(entry.value_json)
    return found


def _chunks(data: bytes) -> Iterator[bytes]:
    """Records of the file (LevelDB's log): 7 bytes of header, blocks of 32 KiB, records in one or more parts."""
    place, record = 7, b""
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _, size, kind = struct.unpack("<IHB", data[place : place + 7])
        if kind == 0 or place + 7 + size > len(data):
            return
        record += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""
