"""transformers 4 in the place of 5: what it saves itself, and what it makes of folders that were exported with 5."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers
from hub_models import HUB_MODELS, logits_of
from transformers.utils import logging

TESTS = Path(__file__).parents[1]

# Made from a config, and not loaded from the hub, these are saved by 5 itself in names or shapes that 4 does not read.
OTHERS = {"qwen3-vl-moe", "gemma3", "llava"}

EXPORT = """
import sys, torch, transformers
from hub_models import HUB_MODELS, hub_model, logits_of
from fsdp_export import Exporter
assert transformers.__version__.startswith("5.")
for kind in HUB_MODELS:
    model = hub_model(kind).eval()
    Exporter(model).save(f"{sys.argv[1]}/{kind}", fsync=False)
    torch.save(logits_of(model), f"{sys.argv[1]}/{kind}/logits.pt")
"""


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders that another process exports with the development set's transformers."""
    folder = tmp_path_factory.mktemp("exported")
    development = next(path for path in sys.path if (Path(path) / "torch").is_dir())
    path = os.pathsep.join([development, str(TESTS.parent), str(TESTS)])
    subprocess.run([sys.executable, "-c", EXPORT, folder], env={**os.environ, "PYTHONPATH": path}, check=True)
    return folder


def test_these_are_the_versions():
    assert transformers.__version__.startswith("4.57.")
    assert tokenizers.__version__.startswith("0.22.")


@pytest.mark.parametrize("kind", [kind for kind in HUB_MODELS if kind not in OTHERS])
def test_what_was_exported_with_5_gives_the_same_logits_in_4(kind, exported):
    """The angles of RoPE too, which 5 writes into its configs under another name."""
    logging.disable_progress_bar()
    (name,) = json.loads((exported / kind / "config.json").read_text())["architectures"]
    model, info = getattr(transformers, name).from_pretrained(exported / kind, output_loading_info=True)
    assert {key: value for key, value in info.items() if value} == {}
    expected = torch.load(exported / kind / "logits.pt")
    torch.testing.assert_close(logits_of(model), expected, rtol=1e-4, atol=1e-5)


def test_what_4_saves_is_what_we_write():
    """The tests of every family, with this version."""
    command = [sys.executable, "-m", "pytest", "-q", "-W", "default", "-p", "no:cacheprovider"]
    files = [str(TESTS / "conversion" / name) for name in ("test_transformers.py", "test_aliases.py", "test_twin.py")]
    subprocess.run([*command, *files], cwd=TESTS.parent, check=True)
