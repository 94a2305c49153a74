"""Release files are consistent: workflows, a changelog by version, and a self-contained wheel."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

import headloss as hl

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def release_notes():
    path = ROOT / "docs" / "release_notes.py"
    spec = importlib.util.spec_from_file_location("release_notes", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_workflows_fit_the_schema() -> None:
    pytest.importorskip("check_jsonschema", reason="it brings the schema of workflows")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema"]
    command += ["vendor.github-workflows", *map(str, WORKFLOWS)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_steps_are_targets_of_the_makefile(path: Path) -> None:
    jobs = yaml.safe_load(path.read_text())["jobs"].values()
    runs = [step["run"] for job in jobs for step in job["steps"] if "run" in step]
    makefile = (ROOT / "Makefile").read_text()
    for run in runs:
        make, target, *given = run.split(" ", 2)
        assert make == "make" and re.search(rf"^{target}:", makefile, re.MULTILINE), run
        for name in re.findall(r"\b([A-Z]+)=", " ".join(given)):
            assert re.search(rf"^{name} \?=", makefile, re.MULTILINE), run
    assert runs


def test_workflows_cover_what_the_package_says_it_supports() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())["jobs"]
    matrix = jobs["tests"]["strategy"]["matrix"]
    text = (ROOT / "pyproject.toml").read_text()
    assert matrix["python"] == re.findall(r"Python :: (3\.\d+)", text)
    assert matrix["torch"] == [re.search(r"torch>=([\d.]+)", text)[1], "newest"]  # type: ignore[index]
    assert {"lint", "tests", "docs", "package"} == jobs.keys()
    publishing = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]
    assert publishing["index"]["permissions"] == {"id-token": "write"}


def test_changelog_has_the_version_that_comes() -> None:
    module = release_notes()
    assert module.version() == hl.__version__
    found = module.sections((ROOT / "CHANGELOG.md").read_text())
    coming = "Unreleased" if ".dev" in hl.__version__ else hl.__version__
    assert next(iter(found)) == coming and "### Added" in found[coming]
    text = "# Changes\n\n## [0.2.0] - 2030-01-01\n\n- b\n\n## [0.1.0]\n\n- a\n"
    assert module.notes("v0.2.0", text, "0.2.0") == "- b"
    assert module.notes("v0.1.0", text, "0.1.0") == "- a"
    for tag, current in (("v0.2.0", "0.1.0"), ("0.1.0", "0.1.0"), ("v0.3.0", "0.3.0")):
        with pytest.raises(ValueError, match=r"^tag: got|has no section"):
            module.notes(tag, text, current)


def closure(name: str, found: dict[str, None]) -> None:
    """Collect a distribution's name and its installed requirements."""
    try:
        wants = importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return
    if name not in found:
        found[name] = None
        for want in wants:
            if "extra ==" not in want:
                closure(re.split(r"[^\w.-]", want, maxsplit=1)[0], found)


def test_the_wheel_works_in_an_environment_that_has_torch_alone(tmp_path: Path) -> None:
    """The built wheel works in an environment with only torch and torch's requirements."""
    pytest.importorskip("hatchling", reason="it builds the wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("headloss-*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    (metadata,) = site.glob("*.dist-info/METADATA")
    required = re.findall(r"^Requires-Dist: (.*)$", metadata.read_text(), re.MULTILINE)
    assert [want for want in required if "extra ==" not in want] == ["torch>=2.10"]
    names: dict[str, None] = {}
    closure("torch", names)
    for name in names:
        files = importlib.metadata.files(name) or []
        for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            link = site / top
            if not link.exists():
                link.symlink_to(importlib.metadata.distribution(name).locate_file(top))
    assert "numpy" not in names and not (site / "transformers").exists()
    code = f"import sys; sys.path.insert(0, {str(site)!r}); from headloss.__main__ import main; "
    for arguments in (["doctor"], ["check", "--quick", "--device", "cpu"]):
        ran = subprocess.run(
            [sys.executable, "-I", "-S", "-c", f"{code}sys.exit(main({arguments}))"],
            cwd=tmp_path, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "cases within budget" in ran.stdout
