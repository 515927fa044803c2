"""Adapters that are trained, saved and loaded by servers that serve them, version by version."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import PeftModel
from peft_models import llama, quiet, with_lora
from ranks import free_port, run_ranks
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard

from fsdp_export import Exporter
from fsdp_export.errors import ExportError, SinkError, UsageError
from fsdp_export.sinks.lora_servers import LoRAServers


class Engine:
    """Keeps to the rules by which vLLM and SGLang load adapters, and reads the files when it is told to.

    Attributes:
        adapters: Of each name the path and the tensors.
        calls: What it was asked for: `load NAME FOLDER`, `unload NAME`.
        refuses: A word; what has it in the path of a folder is not loaded.
    """

    def __init__(self, kind: str, *, knows_in_place: bool = True) -> None:
        self.kind, self.knows_in_place = kind, knows_in_place
        self.adapters: dict[str, tuple[str, dict[str, torch.Tensor]]] = {}
        self.calls: list[str] = []
        self.refuses = ""
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status, text = engine.answer(self.path, body)
                is_good = status == 200
                answer = text if kind == "vllm" else json.dumps({"success": is_good, "error_message": text})
                self.send_response(status)
                self.send_header("Content-Length", str(len(answer.encode())))
                self.end_headers()
                self.wfile.write(answer.encode())

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, str]:
        prefix, _, route = path.rpartition("/")
        assert prefix == ("/v1" if self.kind == "vllm" else "")
        name = body["lora_name"]
        if route == "unload_lora_adapter":
            self.calls.append(f"unload {name}")
            return (200, "") if self.adapters.pop(name, None) else (404 if self.kind == "vllm" else 400, "not there")
        assert route == "load_lora_adapter"
        folder = Path(body["lora_path"])
        self.calls.append(f"load {name} {folder.name}")
        in_place = self.kind == "vllm" and self.knows_in_place and body["load_inplace"]
        if name in self.adapters and not in_place:
            return 400, f"The lora adapter '{name}' has already been loaded."
        if self.refuses and self.refuses in str(folder):
            return 500, "out of slots"
        self.adapters[name] = (str(folder), load_file(folder / "adapter_model.safetensors"))
        return 200, "loaded"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture(params=["vllm", "sglang"])
def engines(request: pytest.FixtureRequest) -> Iterator[list[Engine]]:
    started = [Engine(request.param), Engine(request.param)]
    yield started
    for engine in started:
        engine.close()


def servers_for(engines: list[Engine], **options: Any) -> LoRAServers:
    kind: Any = engines[0].kind
    return LoRAServers([engine.url for engine in engines], engine=kind, timeout=10, **options)


def adapter(folder: Path) -> Path:
    """Write an adapter, as far as `LoRAServers` looks at it."""
    with quiet():
        with_lora("plain").save_pretrained(folder)
    return folder


def train(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.5)


@pytest.mark.parametrize("name", ["policy", "policy-{version}"])
def test_versions_from_two_ranks_are_loaded_and_those_before_dropped(engines, name, tmp_path):
    def check() -> None:
        model, servers = fully_shard(with_lora("plain")), servers_for(engines, name=name, keep=2)
        exporter = Exporter(model, lora="adapter")
        for step in range(3):
            exporter.save(tmp_path / f"step-{step}", published=servers.load, fsync=False)
            train(model)
        assert len(servers.loaded) == (2 if dist.get_rank() == 0 else 0)

    run_ranks(check, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-2"]
    model = with_lora("plain")
    for _ in range(2):
        train(model)
    with quiet():
        model.save_pretrained(tmp_path / "theirs")
        loaded = PeftModel.from_pretrained(llama(), tmp_path / "step-2")
    expected = load_file(tmp_path / "theirs" / "adapter_model.safetensors")
    for key, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], value)
    for engine in engines:
        (said, (path, tensors)), *others = engine.adapters.items()
        assert not others
        assert (said, path) == (name.replace("{version}", "step-2"), str(tmp_path / "step-2"))
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensors[key], value) for key, value in expected.items())
        changes = [call for call in engine.calls if not call.endswith("step-0")]
        if name == "policy" and engine.kind == "vllm":
            assert changes == ["load policy step-1", "load policy step-2"]
        elif name == "policy":
            assert changes == [
                "unload policy",
                "unload policy",
                "load policy step-1",
                "unload policy",
                "load policy step-2",
            ]
        else:
            new = [change for change in changes if change.startswith("load")]
            assert new == ["load policy-step-1 step-1", "load policy-step-2 step-2"]
            assert changes.index(new[1]) < changes.index("unload policy-step-1")


@pytest.mark.parametrize("name", ["policy", "policy-{version}"])
def test_a_version_that_a_server_refuses_is_an_error_of_all_ranks_and_all_go_back(engines, name, tmp_path):
    engines[1].refuses = "step-1"

    def check() -> str:
        model, servers = fully_shard(with_lora("plain")), servers_for(engines, name=name)
        exporter = Exporter(model, lora="adapter")
        exporter.save(tmp_path / "step-0", published=servers.load, fsync=False)
        with pytest.raises(SinkError) as caught:
            exporter.save(tmp_path / "step-1", published=servers.load, fsync=False)
        assert servers.loaded == ([tmp_path / "step-0"] if dist.get_rank() == 0 else [])
        return str(caught.value)

    one, other = run_ranks(check, 2)
    assert one == other
    assert "out of slots" in one
    assert engines[1].url in one
    assert one.endswith("Servers that answer have step-0 again.")
    for engine in engines:
        assert {path for path, _ in engine.adapters.values()} == {str(tmp_path / "step-0")}


def test_a_save_in_the_background_is_loaded_when_it_is_complete(engines, tmp_path):
    def check() -> None:
        model, servers = fully_shard(with_lora("plain")), servers_for(engines)
        Exporter(model, lora="adapter").save(tmp_path / "a", blocking=False, published=servers.load, fsync=False).wait()

    run_ranks(check, 2)
    assert [list(engine.adapters) for engine in engines] == [["policy"]] * 2


def test_a_vllm_that_does_not_exchange_in_place_unloads_before(tmp_path):
    engine = Engine("vllm", knows_in_place=False)
    servers = servers_for([engine])
    for name in ("a", "b"):
        servers.load(adapter(tmp_path / name))
    assert engine.calls == ["load policy a", "load policy b", "unload policy", "load policy b"]
    engine.close()


def test_the_path_may_have_another_name_where_the_engine_runs(engines, tmp_path):
    (tmp_path / "there").symlink_to(tmp_path / "here")
    servers = servers_for(engines, path_there=tmp_path / "there", keep=None)
    for name in ("a", "b", "c"):
        servers.load(adapter(tmp_path / "here" / name))
    assert [engine.adapters["policy"][0] for engine in engines] == [str(tmp_path / "there" / "c")] * 2
    assert [folder.name for folder in servers.loaded] == ["a", "b", "c"]


def test_a_trainer_that_was_restarted_replaces_what_there_is(engines, tmp_path):
    for name in ("a", "b"):
        servers_for(engines).load(adapter(tmp_path / name))
    assert [engine.adapters["policy"][0] for engine in engines] == [str(tmp_path / "b")] * 2


def test_a_server_that_is_not_there_is_named(tmp_path):
    gone = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(SinkError, match=f"POST {gone}/v1/load_lora_adapter failed.*Servers that answer have none"):
        LoRAServers(gone, engine="vllm").load(adapter(tmp_path))


def test_what_is_no_new_adapter_is_refused(engines, tmp_path):
    servers = servers_for(engines)
    with pytest.raises(UsageError, match=r"no adapter_config\.json.*lora='adapter'"):
        servers.load(tmp_path)
    servers.load(adapter(tmp_path / "a"))
    with pytest.raises(UsageError, match="Save every version to a new one"):
        servers.load(tmp_path / "a")
    servers.load(adapter(tmp_path / "b"))
    with pytest.raises(UsageError, match="Save every version to a new one"):
        servers.load(tmp_path / "b" / ".." / "a")
    assert (tmp_path / "a").is_dir()


def test_what_a_save_calls_at_its_end_fails_on_all_ranks_and_the_folder_stays(tmp_path):
    def check() -> None:
        def fail(folder: Path) -> None:
            raise ValueError(f"nobody wants {folder.name}")

        with pytest.raises(ExportError, match="nobody wants out"):
            Exporter(fully_shard(with_lora("plain")), lora="adapter").save(tmp_path / "out", published=fail)

    run_ranks(check, 2)
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()


@pytest.mark.parametrize("options", [{"urls": []}, {"urls": ["http://a", "http://a"]}, {"engine": "tgi"}, {"keep": 0}])
def test_options_that_cannot_work(options):
    with pytest.raises(UsageError):
        LoRAServers(**{"urls": "http://a", "engine": "vllm", **options})
