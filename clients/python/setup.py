"""Compiles the protocol into the package while it is built; everything else is in pyproject.toml.

The .proto files live in the repository's proto/ folder, two levels up from here. A source
distribution carries a copy, so that it can be built where there is no repository.
"""

import atexit
import pathlib
import shutil
import tempfile

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

HERE = pathlib.Path(__file__).resolve().parent
PROTOS = (
    "proto/inference/grpc_service.proto",
    "proto/inference/model_config.proto",
    "proto/espalier/v1/update.proto",
)
DESCRIPTORS = "_protocol.binpb"


def proto_root() -> pathlib.Path:
    """Returns the folder that `import "proto/inference/…"` is relative to."""
    for root in (HERE, HERE.parent.parent):
        if all((root / proto).is_file() for proto in PROTOS):
            return root
    raise FileNotFoundError(
        f"{PROTOS[0]} is neither in {HERE} nor in {HERE.parent.parent}: build from a checkout of "
        "the repository (pip 21.3 or newer builds in place) or from a source distribution"
    )


class BuildWithProtocol(build_py):
    """Adds the serialized FileDescriptorSet that espalier/_wire.py makes its messages from."""

    def run(self) -> None:
        super().run()
        from grpc_tools import protoc

        root = proto_root()
        target = pathlib.Path(
            self.get_package_dir("espalier") if self.editable_mode else self.build_lib
        )
        target = target / DESCRIPTORS if self.editable_mode else target / "espalier" / DESCRIPTORS
        target.parent.mkdir(parents=True, exist_ok=True)
        arguments = ["protoc", f"-I{root}", "--include_imports", f"--descriptor_set_out={target}"]
        if protoc.main(arguments + [str(root / proto) for proto in PROTOS]) != 0:
            raise RuntimeError("protoc failed; its message is above")


class SourceWithProtocol(sdist):
    """Copies the .proto files into the source distribution."""

    def make_release_tree(self, base_dir: str, files: list) -> None:
        super().make_release_tree(base_dir, files)
        root = proto_root()
        for proto in PROTOS:
            target = pathlib.Path(base_dir) / proto
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / proto, target)


# Not build/ in the tree: what an earlier build left there would end up in the wheel.
build_base = tempfile.mkdtemp(prefix="espalier-build-")
atexit.register(shutil.rmtree, build_base, ignore_errors=True)

setup(
    cmdclass={"build_py": BuildWithProtocol, "sdist": SourceWithProtocol},
    options={"build": {"build_base": build_base}},
)
