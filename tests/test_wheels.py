"""The two distributions as users get them: built wheels in a virtual environment that cannot see the repository."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# One worker builds the wheels for all of these tests.
pytestmark = pytest.mark.xdist_group("wheels")

PRODUCT, TESTKIT = "taskharbor-", "taskharbor_testkit-"


def run(*command: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=150,
    )


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both wheels, built without network: the build backend is the one of the development environment."""
    folder = tmp_path_factory.mktemp("wheels")
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-index", "--no-build-isolation"]
    path = os.environ.get("PYTHONPATH", "")
    built = run(*pip, "--wheel-dir", folder, ROOT, ROOT / "testkit", cwd=folder, PYTHONPATH=path)
    assert built.returncode == 0, built.stderr
    return folder


def installed(wheels: Path, folder: Path, *names: str) -> Path:
    """The Python of a new environment with these wheels. Their dependencies come from the current environment; its `.pth`
    files do not count there, so the repository is out of reach."""
    venv.create(folder, with_pip=False)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)}))
    chosen = [path for name in names for path in wheels.glob(f"{name}*.whl")]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target"]
    done = run(*pip, site, *chosen, cwd=folder)
    assert done.returncode == 0, done.stderr
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin" / "python"


def contents(wheels: Path, name: str) -> set[str]:
    (path,) = wheels.glob(f"{name}*.whl")
    return {file for file in zipfile.ZipFile(path).namelist() if ".dist-info/" not in file}


def sources(folder: Path) -> set[str]:
    files = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(folder).as_posix() for path in files}


def test_each_wheel_holds_its_own_package_and_nothing_of_the_other(wheels: Path) -> None:
    product, testkit = contents(wheels, PRODUCT), contents(wheels, TESTKIT)
    assert product == sources(ROOT / "src")
    assert testkit == sources(ROOT / "testkit" / "src")
    assert {"taskharbor/py.typed", "pyspark_taskharbor/__init__.py"} <= product
    assert "taskharbor_testkit/py.typed" in testkit
    assert {name.partition("/")[0] for name in product} == {"taskharbor", "pyspark_taskharbor"}
    assert {name.partition("/")[0] for name in testkit} == {"taskharbor_testkit"}


def readme_test() -> str:
    """The test file that the testkit's README tells an author to write."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "testkit" / "README.md").read_text(), re.DOTALL)
    assert len(code.splitlines()) <= 10
    return str(code)


def test_ten_lines_judge_a_driver(wheels: Path, tmp_path: Path) -> None:
    python = installed(wheels, tmp_path / "environment", PRODUCT, TESTKIT)
    (tmp_path / "test_driver.py").write_text(readme_test())
    where = run(python, "-c", "import taskharbor_testkit; print(taskharbor_testkit.__file__)", cwd=tmp_path)
    assert where.stdout.startswith(str(tmp_path)), where.stderr

    judged = run(
        *(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_driver.py"),
        *("-k", "crash or state_machine"),
        cwd=tmp_path,
        TASKHARBOR_CONFORMANCE_EXAMPLES="3",
    )

    assert judged.returncode == 0, judged.stdout + judged.stderr
    assert re.search(r"[1-9]\d* passed", judged.stdout)
    assert "failed" not in judged.stdout


def test_the_product_works_without_the_testkit(wheels: Path, tmp_path: Path) -> None:
    python = installed(wheels, tmp_path / "environment", PRODUCT)
    assert run(python, "-c", "import taskharbor_testkit", cwd=tmp_path).returncode == 1

    demo = run(python, "-m", "taskharbor", "demo", "--jobs", "100", "--queue-only", cwd=tmp_path)
    assert demo.returncode == 0, demo.stdout + demo.stderr

    history = run(python, "-m", "taskharbor", "history", "--rows", "10", "--parquet", "made", cwd=tmp_path)
    assert history.returncode != 0
    assert "pip install 'taskharbor-testkit[histories]'" in history.stdout + history.stderr
