"""What pyproject.toml cannot say: packages under their import names, and code made from proto/."""

import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

GENERATED = Path("build/proto")
FOLDERS = {
    "decodestep.accel": "accel",
    "decodestep.service": "service",
    "decodestep.client": "client/python",
    "decodestep.v1": "build/proto/decodestep/v1",
}


def generate() -> None:
    """Write decodestep/v1/*_pb2.py, *_pb2_grpc.py and their .pyi from proto/ to build/proto/."""
    shutil.rmtree(GENERATED, ignore_errors=True)
    GENERATED.mkdir(parents=True)
    outputs = [f"--{kind}_out={GENERATED}" for kind in ("python", "grpc_python")]
    stubs = [f"--{kind}_out=quiet:{GENERATED}" for kind in ("mypy", "mypy_grpc")]
    protos = sorted(map(str, Path("proto/decodestep/v1").glob("*.proto")))
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", "-Iproto", *outputs, *stubs, *protos], check=True
    )
    package = GENERATED / "decodestep/v1"
    package.joinpath("__init__.py").write_text('"""Python code of the contract, made from proto/."""\n')
    package.joinpath("py.typed").touch()


class BuildPy(build_py):
    """Generates before setuptools looks for modules, whatever is built: wheel, sdist or editable install."""

    def finalize_options(self) -> None:
        generate()
        super().finalize_options()


setup(
    package_dir=FOLDERS,
    packages=[
        *FOLDERS,
        *(f"{name}.{package}" for name, folder in FOLDERS.items() for package in find_packages(folder)),
    ],
    cmdclass={"build_py": BuildPy},
)
