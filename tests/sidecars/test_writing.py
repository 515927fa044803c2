"""How sidecars are written."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from hub_folders import ALL_FILES, CONFIG, write_hub_folder

from fsdp_export.sidecars.of_folder import from_folder
from fsdp_export.sidecars.sidecar import Origin, Sidecar, Sidecars
from fsdp_export.sidecars.writing import write


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_hub_folder(tmp_path / "base")


def _write(sidecars: Sidecars, folder: Path) -> list[str]:
    folder.mkdir()
    return list(write(sidecars, folder))


def test_what_is_too_large_for_what_it_is_called_is_left_out(base: Path, tmp_path: Path) -> None:
    os.truncate(base / "tokenizer.json", 1 << 40)
    sidecars, out = from_folder(base), tmp_path / "out"
    out.mkdir()
    assert "tokenizer.json" not in write(sidecars, out)
    assert "tokenizer.json" in sidecars.missing
    assert "tokenizer.json was not written: too large for what it is called" in sidecars.warnings
    assert not (out / "tokenizer.json").exists()


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077], ids=oct)
def test_permissions_follow_the_umask(umask: int, base: Path, tmp_path: Path) -> None:
    for path in base.iterdir():
        path.chmod(0o600)
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates/tools.jinja").write_text("x")
    old = os.umask(umask)
    try:
        names = _write(from_folder(base), tmp_path / "out")
    finally:
        os.umask(old)
    assert "additional_chat_templates/tools.jinja" in names
    assert {stat.S_IMODE((tmp_path / "out" / name).stat().st_mode) for name in names} == {0o666 & ~umask}


def test_a_file_that_cannot_be_written_is_left_out_and_told(base: Path, tmp_path: Path) -> None:
    sidecars = from_folder(base)
    (base / "tokenizer.json").unlink()
    sidecars.files.append(Sidecar("config.json", Origin("source"), b"{}"))
    names = _write(sidecars, tmp_path / "out")
    assert set(names) == ALL_FILES - {"tokenizer.json"} == {path.name for path in (tmp_path / "out").iterdir()}
    assert sidecars.missing == ["tokenizer.json", "config.json"]
    assert sidecars.warnings == [
        "tokenizer.json was not written: No such file or directory",
        "config.json was not written: File exists",
    ]
    assert (tmp_path / "out/config.json").read_text() == CONFIG
