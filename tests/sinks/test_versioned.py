"""Saves into a folder per version, and engines that load each of them."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from exports import assert_same, expected_export
from faults import outcome_of, the_error
from models import hf_model, shard, tiny
from peft_models import with_lora
from publish_faults import dies_at
from ranks import run_ranks
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from fsdp_export import Exporter, save_checkpoint
from fsdp_export.errors import SinkError, UsageError
from fsdp_export.publish.versions import versions_in
from fsdp_export.sinks.versioned import FolderPerVersion


class Engine:
    """An engine that loads what it is told to, from disk.

    Attributes:
        url: Where it is.
        requests: Route and body of every request so far.
        loaded: The first parameter of every model that it loaded.
        refuses: A route that is answered with an error once.
    """

    def __init__(self) -> None:
        self.requests: list[tuple[str, Any]] = []
        self.loaded: list[float] = []
        self.refuses = ""
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"null")
                engine.requests.append((self.path, body))
                is_refused = self.path == engine.refuses
                engine.refuses = "" if is_refused else engine.refuses
                path = engine.path_of(self.path, body)
                if path and not is_refused:
                    engine.loaded.append(value_in(path))
                data = json.dumps({"success": not is_refused, "message": "out of luck"}).encode()
                self.send_response(400 if is_refused else 200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def path_of(self, route: str, body: Any) -> str | None:
        if route == "/update_weights_from_disk":
            return body["model_path"]
        if route == "/collective_rpc":
            assert body["method"] == "reload_weights"
            return body["kwargs"]["weights_path"]
        return None

    def routes(self) -> list[str]:
        return [route for route, _ in self.requests]


@pytest.fixture
def engine() -> Iterator[Engine]:
    running = Engine()
    yield running
    running.server.shutdown()
    running.server.server_close()


def filled(value: float) -> Any:
    model = hf_model("qwen2")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def fill(model: Any, value: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


# Two threads within `from_pretrained` can leave its class without `tie_weights` for good.
loading = threading.Lock()


def value_in(folder: str | Path) -> float:
    """Return the value that a model in a folder is filled with."""
    with loading:
        model = AutoModelForCausalLM.from_pretrained(folder)
    values = {value for parameter in model.parameters() for value in parameter.detach().unique().tolist()}
    (value,) = values
    return float(value)


def names_in(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_every_save_is_a_whole_checkpoint_and_the_link_follows(tmp_path):
    def save() -> None:
        versions = FolderPerVersion(tmp_path / "weights", keep=2)
        exporter = Exporter(shard(tiny(), "1d", 2))
        for number in (1, 2, 3):
            report = exporter.save(versions, max_shard_size="1KB")
            assert report.path == tmp_path / "weights" / f"00000{number}"

    run_ranks(save, 2)
    root = tmp_path / "weights"
    assert names_in(root) == ["000002", "000003", "latest"]
    assert os.path.realpath(root / "latest") == str(root / "000003")
    expected = expected_export(tiny())
    for name in ("000002", "latest"):
        saved = load_file(root / name / "model.safetensors")
        assert_same({tensor: saved[tensor] for tensor in expected}, expected)
        assert (root / name / "fsdp_export.json").is_file()


@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "behind"])
def test_folders_are_those_of_save_checkpoint(blocking, tmp_path):
    def save() -> Path:
        model = shard(filled(1), "1d", 2)
        save_checkpoint(model, tmp_path / "plain", max_shard_size="4KB")
        versions = FolderPerVersion(tmp_path / "weights", version="step-7")
        saved = save_checkpoint(model, versions, max_shard_size="4KB", blocking=blocking)
        assert saved.path == tmp_path / "weights" / "step-7"
        if not blocking:
            fill(model, 2)
            assert saved.wait().path == saved.path
        return saved.path

    folder, _ = run_ranks(save, 2)
    plain = {path.name: path.read_bytes() for path in (tmp_path / "plain").iterdir()}
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.name[0] != "."} == plain
    assert value_in(tmp_path / "weights" / "latest") == 1


def test_a_rank_that_fails_leaves_the_versions_and_the_next_save_succeeds(tmp_path):
    def save(failing: int) -> Any:
        versions = FolderPerVersion(tmp_path, keep=1)
        exporter = Exporter(shard(tiny(), "dim1", 2), bucket_bytes=64)
        exporter.save(versions)
        names = names_in(tmp_path)
        dist.barrier()

        def fail(_: int) -> None:
            if dist.get_rank() == failing:
                raise ValueError("out of luck")

        outcome = outcome_of(lambda: exporter.save(versions, delivered=fail))
        dist.barrier()
        assert names_in(tmp_path) == names
        dist.barrier()
        exporter.save(versions)
        return outcome

    for failing in (0, 1):
        _, text = the_error(run_ranks(save, 2, failing))
        assert "out of luck" in text
    assert names_in(tmp_path) == ["000004", "latest"]


def test_a_save_that_dies_anywhere_leaves_a_link_to_a_whole_version(tmp_path):
    def save(value: float) -> None:
        Exporter(filled(value)).save(FolderPerVersion(tmp_path, keep=1), max_shard_size="4KB")

    save(1)
    current = 1.0
    for number in range(200):
        has_died = dies_at(number, partial(save, number + 2), tmp_path)
        found = value_in(tmp_path / "latest")
        assert found in {current, number + 2}
        current = found
        for path in versions_in(tmp_path):
            value_in(path)
        if not has_died:
            break
    assert current == number + 2 > 30
    assert names_in(tmp_path) == [versions_in(tmp_path)[0].name, "latest"]


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_an_engine_loads_every_version(kind, tmp_path, engine):
    versions = FolderPerVersion(tmp_path, keep=1, urls=engine.url, engine=kind, pause="abort")
    model = hf_model("qwen2")
    exporter = Exporter(model)
    for value in (1.0, 2.0):
        fill(model, value)
        exporter.save(versions)
    versions.version = "step-3"
    fill(model, 3.0)
    exporter.save(versions)
    assert engine.loaded == [1.0, 2.0, 3.0]
    bodies = [body for route, body in engine.requests if engine.path_of(route, body)]
    names = ["000001", "000002", "step-3"]
    if kind == "sglang":
        assert engine.routes() == 3 * ["/pause_generation", "/update_weights_from_disk", "/continue_generation"]
        expected = [{"model_path": str(tmp_path / name), "weight_version": name, "flush_cache": True} for name in names]
        assert bodies == expected
    else:
        routes = ["/pause?mode=abort", "/collective_rpc", "/reset_prefix_cache?reset_running_requests=true"]
        assert engine.routes() == 3 * [*routes, "/reset_encoder_cache", "/update_weight_version", "/resume"]
        told = [body["new_version"] for route, body in engine.requests if route == "/update_weight_version"]
        assert told == names


def test_an_engine_that_cannot_load_is_an_error_and_older_versions_stay(tmp_path, engine):
    versions = FolderPerVersion(tmp_path, keep=1, urls=engine.url, engine="sglang")
    model = filled(1)
    exporter = Exporter(model)
    exporter.save(versions)
    engine.refuses = "/update_weights_from_disk"
    fill(model, 2)
    with pytest.raises(SinkError, match=r'/update_weights_from_disk was refused: found HTTP 400: .*"out of luck"'):
        exporter.save(versions)
    assert names_in(tmp_path) == ["000001", "000002", "latest"]
    exporter.save(versions)
    assert names_in(tmp_path) == ["000003", "latest"]
    assert engine.loaded == [1.0, 2.0]


def test_engines_that_load_nothing_since_one_cannot_be_paused_go_on(tmp_path, engine):
    other = Engine()
    urls = [engine.url, other.url]
    versions = FolderPerVersion(tmp_path, urls=urls, engine="sglang", pause="abort")
    exporter = Exporter(filled(1))
    pause, update, resume = "/pause_generation", "/update_weights_from_disk", "/continue_generation"
    # After an update that was broken off nobody knows what they have.
    for refused, routes in [(pause, [pause, resume]), (update, [pause, update]), (pause, [pause])]:
        engine.requests, other.refuses = [], refused
        with pytest.raises(SinkError, match="out of luck"):
            exporter.save(versions)
        assert engine.routes() == routes
    versions.version = 7
    assert exporter.save(versions).path == tmp_path / "7"
    assert engine.routes()[-1] == resume
    other.server.shutdown()
    other.server.server_close()


def test_an_engine_sees_the_folder_elsewhere(tmp_path, engine):
    (tmp_path / "there").symlink_to(tmp_path / "here")
    options: dict[str, Any] = {"urls": [engine.url], "engine": "sglang", "flush_cache": False}
    Exporter(filled(1)).save(FolderPerVersion(tmp_path / "here", engine_path=tmp_path / "there", **options))
    assert engine.requests[0][1]["model_path"] == str(tmp_path / "there" / "000001")
    assert engine.requests[0][1]["flush_cache"] is False


def test_versions_of_an_adapter(tmp_path, engine):
    model = with_lora("plain")
    report = save_checkpoint(model, FolderPerVersion(tmp_path))
    assert {"adapter_model.safetensors", "adapter_config.json"} < {path.name for path in report.path.iterdir()}
    with pytest.raises(UsageError, match=r"no engine reloads its model from a LoRA adapter\. Use lora='merge'"):
        save_checkpoint(model, FolderPerVersion(tmp_path, urls=engine.url, engine="vllm"))
    assert names_in(tmp_path) == ["000001", "latest"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": 0}, "no version to keep: expected at least 1, or None for all, found 0"),
        ({"urls": "http://a:1"}, "urls and engine go together"),
        ({"engine": "vllm"}, "urls and engine go together"),
        ({"urls": "http://a:1", "engine": "tgi"}, "no such engine"),
    ],
)
def test_options_that_cannot_work(options, message, tmp_path):
    with pytest.raises(UsageError, match=message):
        FolderPerVersion(tmp_path, **options)


def test_who_is_told_of_a_version_gets_its_complete_folder(tmp_path):
    told: list[list[str]] = []

    def published(folder: Path) -> None:
        assert folder.parent == tmp_path / "versions"
        told.append(sorted(file.name for file in folder.iterdir()))

    for _ in range(2):
        Exporter(tiny()).save(FolderPerVersion(tmp_path / "versions"), published=published)
    assert len(told) == 2
    assert all("model.safetensors" in names for names in told)
