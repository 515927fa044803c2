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
from loading import assert_holds, snapshot, spoiled
from models import shard
from ranks import run_ranks
from transformers.utils import logging

from fsdp_export import load_checkpoint

TESTS = Path(__file__).parents[1]

# 5 turns the experts of this one as it loads them from the hub, and not back as it saves: 4 does not read them.
KINDS = [kind for kind in HUB_MODELS if kind != "qwen3-vl-moe"]
# In a config of this one 5 gives the number of experts another name: 4 refuses the weights of a copied one.
COPIED = [kind for kind in KINDS if kind != "qwen3-moe"]

EXPORT = """
import sys, torch, transformers
from hub_models import HUB_MODELS, hub_model, logits_of, save_as_hub, trained
from fsdp_export import Exporter
assert transformers.__version__.startswith("5.")

def with_other_angles(model):
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    for each in (rope, *rope.values()):
        if isinstance(each, dict) and "rope_theta" in each:
            each["rope_theta"] = 50.0
    return type(model)(model.config)

for kind in HUB_MODELS:
    made = with_other_angles(hub_model(kind))
    save_as_hub(made, f"{sys.argv[1]}/hub/{kind}")
    model = trained(type(made).from_pretrained(f"{sys.argv[1]}/hub/{kind}"))
    for how in ("copied", "made"):
        Exporter(model).save(f"{sys.argv[1]}/{how}/{kind}", fsync=False)
        torch.save(logits_of(model), f"{sys.argv[1]}/{how}/{kind}/logits.pt")
        model.config.name_or_path = ""  # whose config, written by 5, was copied
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


@pytest.mark.parametrize(("how", "kind"), [*(("made", kind) for kind in KINDS), *(("copied", kind) for kind in COPIED)])
def test_what_was_exported_with_5_gives_the_same_logits_in_4(how, kind, exported):
    """The angles of RoPE too, which 5 writes into its configs under another name."""
    logging.disable_progress_bar()
    folder = exported / how / kind
    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    model, info = getattr(transformers, name).from_pretrained(folder, output_loading_info=True)
    assert {key: value for key, value in info.items() if value} == {}
    expected = torch.load(folder / "logits.pt")
    torch.testing.assert_close(logits_of(model), expected, rtol=0, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("kind", KINDS)
def test_shards_of_models_of_4_take_what_was_exported_with_5(kind, exported):
    folder = exported / "made" / kind
    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    expected = getattr(transformers, name).from_pretrained(folder)

    def load() -> None:
        values = snapshot(shard(expected, "1d", 2))
        model = spoiled(shard(getattr(transformers, name)(expected.config), "1d", 2))
        load_checkpoint(model, folder)
        assert_holds(model, values)

    run_ranks(load, 2)


def test_what_4_saves_is_what_we_write():
    """The tests of every family, with this version."""
    command = [sys.executable, "-m", "pytest", "-q", "-W", "default", "-p", "no:cacheprovider"]
    files = [str(TESTS / "conversion" / name) for name in ("test_transformers.py", "test_aliases.py", "test_twin.py")]
    subprocess.run([*command, *files], cwd=TESTS.parent, check=True)
