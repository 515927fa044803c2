"""The scripts in bin/: which Python they find, what they set up, and what they leave alone."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
TOOLS = ("cat", "dirname", "find", "mkdir", "readlink", "rm", "sed", "touch")
REPORT = """
import json, os, sys
print(json.dumps({"arguments": sys.argv[1:], "chosen": os.environ.get("CHOSEN"), "prefix": sys.prefix}))
"""

needs_ensurepip = pytest.mark.skipif(find_spec("ensurepip") is None, reason="this Python has no ensurepip")


@pytest.fixture
def env(tmp_path):
    """An environment in which no Python is at hand and pip finds no packages."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in TOOLS:
        (tools / tool).symlink_to(shutil.which(tool))
    return {"PATH": str(tools), "HOME": str(tmp_path / "home"), "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}


@pytest.fixture
def checkout(tmp_path):
    """A copy of the checkout without a virtual environment, whose command reports how it was called."""
    folder = tmp_path / "checkout"
    shutil.copytree(ROOT / "bin", folder / "bin")
    for name in ("pyproject.toml", "requirements-dev.txt"):
        shutil.copy(ROOT / name, folder)
    package = folder / "fsdp_export"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(REPORT)
    return folder


@pytest.fixture(scope="module")
def bare_venv(tmp_path_factory):
    """A virtual environment that has nothing, not even pip."""
    folder = tmp_path_factory.mktemp("bare") / "venv"
    subprocess.run([sys.executable, "-I", "-m", "venv", "--without-pip", folder], check=True)
    return folder


@pytest.fixture(scope="module")
def needs(bare_venv):
    """What bin/needs.py says of a Python that has nothing: all that pyproject.toml asks for."""
    command = [bare_venv / "bin/python", ROOT / "bin/needs.py", ROOT / "pyproject.toml"]
    return [Requirement(need) for need in subprocess.check_output(command, text=True).split()]


@pytest.fixture(scope="module")
def pins():
    """The pins of requirements-dev.txt that hold for this Python."""
    lines = (ROOT / "requirements-dev.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {pin.name: next(iter(pin.specifier)).version for pin in pins if not pin.marker or pin.marker.evaluate()}


@pytest.fixture(scope="module")
def wheels(needs, pins, tmp_path_factory):
    """A folder with an empty wheel of the pinned version of every need."""
    folder = tmp_path_factory.mktemp("wheels")
    for name in (need.name for need in needs):
        info = f"{name}-{pins[name]}.dist-info"
        with zipfile.ZipFile(folder / f"{name}-{pins[name]}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}/__init__.py", "")
            wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {pins[name]}\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")
    return folder


def capable_python(path):
    """Make a Python that has every need and says in CHOSEN that it was chosen."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'#!/bin/sh\nCHOSEN=$0 exec {sys.executable} "$@"\n')
    path.chmod(0o755)
    return path


def call(*command, env, cwd=None):
    return subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, check=False)


def report_of(result):
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def listing_of(folder):
    return sorted(folder.rglob("*"))


def without_write_permission(folder):
    """Take write permission from a folder, and return the prefix of a command on which that binds, root or not."""
    for path in [folder, *folder.rglob("*")]:
        path.chmod(path.stat().st_mode & ~0o222)
    if os.geteuid():
        return []
    prefix = [shutil.which("setpriv") or pytest.skip("root may write everywhere"), "--bounding-set=-dac_override"]
    assert call(*prefix, "test", "-w", folder, env=dict(os.environ)).returncode == 1
    return prefix


def test_help_from_a_folder_full_of_namesakes(env, tmp_path):
    for name in ("click", "fsdp_export", "json", "runpy", "torch", "transformers"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(f'imported {__file__}')")
    named = env | {"FSDP_EXPORT_PYTHON": sys.executable}
    result = call(ROOT / "bin/fsdp-export", "--help", env=named, cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert "--out" in result.stdout


def test_help_imports_neither_torch_nor_transformers(env):
    result = call(sys.executable, "-X", "importtime", "-m", "fsdp_export", "--help", env=env, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    imported = {line.rsplit("|", 1)[-1].strip() for line in result.stderr.splitlines()}
    assert "fsdp_export.cli" in imported
    assert not imported & {"torch", "transformers"}


def test_runs_through_symbolic_links(checkout, env, tmp_path):
    links = tmp_path / "links"
    links.mkdir()
    (links / "absolute").symlink_to(checkout / "bin/fsdp-export")
    (links / "fsdp-export").symlink_to("absolute")
    (tmp_path / "shortcut").symlink_to("links/fsdp-export")
    named = env | {"FSDP_EXPORT_PYTHON": sys.executable}
    result = call("../shortcut", "two words", "", "--out", "*", env=named, cwd=links)
    assert report_of(result)["arguments"] == ["two words", "", "--out", "*"]


def test_writes_nothing_into_a_read_only_checkout(checkout, env):
    before = listing_of(checkout)
    prefix = without_write_permission(checkout)
    report_of(call(*prefix, checkout / "bin/fsdp-export", env=env | {"FSDP_EXPORT_PYTHON": sys.executable}))
    assert listing_of(checkout) == before


@pytest.mark.parametrize("place", ["named", "active", "conda", "checkout", "path", "cache"])
def test_chooses_the_first_python_that_has_the_needs(place, checkout, env, tmp_path, bare_venv):
    order = ["active", "conda", "checkout", "path", "cache"]
    pythons = {
        "named": tmp_path / "named/bin/python",
        "active": tmp_path / "active/bin/python",
        "conda": tmp_path / "conda/bin/python",
        "checkout": checkout / ".venv/bin/python",
        "path": tmp_path / "path/python3",
        "cache": tmp_path / "cache/fsdp-export/venv/bin/python",
    }
    # Those before it lack the needs, those after it have them as well.
    for name in order[: order.index(place)] if place != "named" else []:
        pythons[name].parent.mkdir(parents=True)
        pythons[name].symlink_to(bare_venv / "bin/python")
    for name in order[order.index(place) :] if place != "named" else ["named", *order]:
        capable_python(pythons[name])
    env |= {
        "VIRTUAL_ENV": str(tmp_path / "active"),
        "CONDA_PREFIX": str(tmp_path / "conda"),
        "PATH": f"{tmp_path / 'path'}:{env['PATH']}",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    if place == "named":
        env["FSDP_EXPORT_PYTHON"] = str(pythons["named"])
    result = call(checkout / "bin/fsdp-export", env=env)
    assert report_of(result)["chosen"] == str(pythons[place])
    assert result.stderr == ""


def test_a_named_python_must_have_the_needs(checkout, env, bare_venv, needs):
    env["FSDP_EXPORT_PYTHON"] = str(bare_venv / "bin/python")
    result = call(checkout / "bin/fsdp-export", env=env)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith(f"fsdp-export: FSDP_EXPORT_PYTHON={bare_venv}/bin/python lacks torch>=2.8 ")
    assert all(need.name in result.stderr for need in needs)


def test_says_which_pythons_it_looked_for(checkout, env, tmp_path):
    old = tmp_path / "tools/python3.12"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    result = call(checkout / "bin/fsdp-export", env=env)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("fsdp-export: Python 3.10 or newer is needed; looked on PATH for python3 python3.")
    assert not (checkout / ".venv").exists()


def test_says_what_debian_keeps_apart(checkout, env, tmp_path, bare_venv):
    python = tmp_path / "tools/python3"
    python.write_text(f'#!/bin/sh\ncase $* in *ensurepip*) exit 1 ;; esac\nexec {bare_venv}/bin/python "$@"\n')
    python.chmod(0o755)
    result = call(checkout / "bin/fsdp-export", env=env)
    assert result.returncode == 1
    assert result.stderr.endswith("fsdp-export: python3 has neither ensurepip nor pip: apt-get install python3-venv\n")


@needs_ensurepip
def test_a_read_only_checkout_gets_its_environment_in_the_cache(checkout, env, tmp_path, bare_venv):
    (tmp_path / "tools/python3").symlink_to(bare_venv / "bin/python")
    before = listing_of(checkout)
    prefix = without_write_permission(checkout)
    result = call(*prefix, checkout / "bin/fsdp-export", env=env)
    assert result.returncode == 1
    assert f"setting up {tmp_path}/home/.cache/fsdp-export/venv (once; it takes minutes)\n" in result.stderr
    assert "fsdp-export: pip could not install what is needed (see above)" in result.stderr
    assert listing_of(checkout) == before


@needs_ensurepip
def test_two_first_uses_after_one_that_was_killed_make_one_environment(
    checkout, env, tmp_path, bare_venv, needs, wheels
):
    (tmp_path / "tools/python3").symlink_to(bare_venv / "bin/python")
    env["PIP_FIND_LINKS"] = str(wheels)
    command = [checkout / "bin/fsdp-export", "argument"]
    state = checkout / ".venv/.fsdp-export-state"

    killed = subprocess.Popen(command, env=env, start_new_session=True, stderr=subprocess.DEVNULL)
    while not (checkout / ".venv/bin/python").exists():
        assert killed.poll() is None
        time.sleep(0.01)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    assert state.read_text() == "new\n"
    (site_packages,) = (checkout / ".venv").glob("lib/python*/site-packages")
    for need in needs:
        (site_packages / f"{need.name}.py").write_text("half made")

    pipe = subprocess.PIPE
    racers = [subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True) for _ in range(2)]
    outputs = [racer.communicate() for racer in racers]
    for stdout, stderr in outputs:
        assert json.loads(stdout) == {"arguments": ["argument"], "chosen": None, "prefix": f"{checkout}/.venv"}, stderr
    said = "".join(stderr for _, stderr in outputs)
    assert said.count(f"; setting up {checkout}/.venv (once; it takes minutes)\n") == 1
    assert said.count(f"fsdp-export: waiting for another process that is setting up {checkout}/.venv\n") == 1
    assert state.read_text() == "runtime\n"
    assert not (site_packages / "torch.py").exists()

    again = call(*command, env=env)
    assert report_of(again)["prefix"] == f"{checkout}/.venv"
    assert again.stderr == ""


def test_pins_meet_the_needs(needs, pins):
    assert {need.name: pins[need.name] for need in needs if pins[need.name] not in need.specifier} == {}


@pytest.mark.parametrize(("argument", "code"), [("--version", 0), ("nothing.py", 4)], ids=["version", "no such file"])
def test_bin_test_hands_arguments_and_exit_code_on(argument, code, tmp_path):
    env = dict(os.environ) | {"FSDP_EXPORT_PYTHON": sys.executable}
    assert call(ROOT / "bin/test", argument, env=env, cwd=tmp_path).returncode == code
