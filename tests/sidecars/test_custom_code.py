"""Code of a model's own: which files it is, found without running any of it."""

from __future__ import annotations

from pathlib import Path

from fsdp_export.sidecars.custom_code import code_files


def test_code_is_what_auto_map_names_and_imports(tmp_path: Path) -> None:
    for name, text in {
        "modeling_my": "from .configuration_my import C\nfrom . import helper\nfrom ..other import x\nimport torch",
        "configuration_my": "from .deep.down import y\nfrom .gone import z",
        "helper": "not python at all (",
        "other": "",
        "deep": "",
        "_fsdp_init": "",
    }.items():
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path.parent / "outside.py").write_text("")
    auto_map = {
        "AutoModel": "modeling_my.M",
        "AutoConfig": "someone/else--other.C",
        "AutoTokenizer": ["../outside.T", None],
        "AutoModelForCausalLM": "_fsdp_init.FSDPM",
    }
    assert list(code_files(tmp_path, {"auto_map": auto_map})) == [
        "configuration_my.py",
        "deep.py",
        "helper.py",
        "modeling_my.py",
    ]
    assert code_files(tmp_path, {}) == {}
