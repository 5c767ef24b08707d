#!/usr/bin/env python3
"""Who may include what: the house map of CONTRIBUTING.md, checked against every #include in the tree.

Run by CTest and by hand: python3 tests/layering_test.py. Prints each violation as file:line and exits 1.
"""
import pathlib
import re
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent

# Folder -> folders of ours that it may include besides itself. The longest matching prefix of a file's path counts.
OURS = {
    "kernels/base": [],
    "kernels": ["kernels"],
    "engine/tensor": ["kernels"],
    "engine/sparse": ["engine/tensor", "kernels"],
    "engine/formats": ["engine/tensor", "kernels/base", "proto/inference/model_config"],
    "engine/graph": ["engine/formats", "engine/sparse", "engine/tensor", "kernels"],
    "engine/planner": ["engine/graph", "engine/formats", "engine/sparse", "engine/tensor", "kernels"],
    "engine/runtime": ["engine/updates", "engine/planner", "engine/graph", "engine/formats", "engine/sparse", "engine/tensor", "kernels",
                       "proto/inference/model_config"],
    "engine/updates": ["engine/planner", "engine/graph", "engine/formats", "engine/sparse", "engine/tensor", "kernels"],
    "service": ["engine/runtime", "engine/updates", "engine/tensor", "kernels/base", "proto"],
    "proto": [],
    "clients/cpp": ["proto", "kernels/base"],
    "clients/bench": ["clients/cpp", "proto"],
    "clients/cli": ["clients/cpp", "clients/bench", "proto", "engine/formats", "engine/sparse", "engine/planner", "engine/updates",
                    "engine/tensor", "kernels/base"],
    "tests": ["kernels", "engine", "service", "proto", "clients"],
}

# Third-party include prefix -> folders that may use it. What is not listed (the C++ and POSIX headers) is free.
THIRD_PARTY = {
    r"absl/": ["engine", "service", "clients", "tests"],
    r"spdlog/": ["engine", "service", "tests"],
    r"(oneapi/)?tbb/": ["engine/tensor", "tests"],
    r"onnx/": ["engine/formats", "tests"],
    r"google/protobuf/": ["engine/formats", "service", "clients", "tests"],
    r"grpc(pp|\+\+)?/": ["service", "clients", "tests"],
    r"prometheus/": ["service", "tests"],
    r"openssl/|zstd": ["engine/updates", "tests"],
    r"hwy/": ["kernels", "tests"],
    r"(oneapi/)?dnnl": ["kernels", "tests"],
    r"zlib": ["clients", "tests"],
    r"cuda|cublas|cusparse|mma\.h|cooperative_groups|nvml": ["kernels", "tests"],
    r"gtest/|gmock/|benchmark/": ["tests"],
}
# Allowed for a reason that the table's grain cannot show.
EXCEPTIONS = {
    # One implementation of SHA-256 for content digests.
    ("engine/planner", "openssl/"), ("engine/runtime", "openssl/"),
}
INCLUDE = re.compile(r'^\s*#\s*include\s+["<]([^">]+)[">]')
OUR_ROOTS = ("kernels/", "engine/", "service/", "proto/", "clients/", "tests/")


def violations(path: str, text: str) -> list[str]:
    """Returns one line per forbidden include in the file `path` (relative to the root) with content `text`."""
    owner = max((folder for folder in OURS if path.startswith(folder + "/")), key=len, default=None)
    found = []
    if owner is None:
        return found
    for number, line in enumerate(text.splitlines(), 1):
        match = INCLUDE.match(line)
        if not match:
            continue
        target = match.group(1)
        if target.startswith(OUR_ROOTS):
            if not (target.startswith(owner + "/") or any(target.startswith(allowed) for allowed in OURS[owner])):
                found.append(f"{path}:{number}: {owner} may not include {target}")
            continue
        for pattern, folders in THIRD_PARTY.items():
            allowed = any(path.startswith(folder + "/") for folder in folders)
            excepted = any(path.startswith(f + "/") and target.startswith(p) for f, p in EXCEPTIONS)
            if re.match(pattern, target) and not allowed and not excepted:
                found.append(f"{path}:{number}: {owner} may not include {target}")
    return found


def sources() -> list[pathlib.Path]:
    return [path for folder in ("kernels", "engine", "service", "clients", "tests", "proto")
            for path in sorted((ROOT / folder).rglob("*"))
            if path.suffix in (".h", ".cc", ".cu", ".cuh", ".inc", ".c")]


class LayeringTest(unittest.TestCase):

    def test_every_include_in_the_tree_keeps_to_the_house_map(self):
        files = sources()
        self.assertGreater(len(files), 20)
        found = [line for path in files
                 for line in violations(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"))]
        self.assertEqual(found, [], "\n" + "\n".join(found))

    def test_a_forbidden_include_is_found(self):
        self.assertTrue(violations("kernels/linear/x.cc", '#include "engine/tensor/tensor.h"\n'))
        self.assertTrue(violations("kernels/linear/x.cc", "#include <grpcpp/grpcpp.h>\n"))
        self.assertTrue(violations("engine/tensor/x.cc", '#include "engine/sparse/structure.h"\n'))
        self.assertTrue(violations("engine/runtime/x.cc", "#include <cuda_runtime.h>\n"))
        self.assertTrue(violations("service/x.cc", '#include "kernels/linear/linear.h"\n'))
        self.assertFalse(violations("engine/sparse/x.cc", '#include "engine/tensor/tensor.h"\n#include <vector>\n'))

    def test_engine_headers_have_no_conditional_compilation(self):
        for path in sources():
            relative = str(path.relative_to(ROOT))
            if relative.startswith("engine/") and path.suffix == ".h":
                self.assertIsNone(re.search(r"^\s*#\s*if(n?def)?\b", path.read_text(encoding="utf-8"), re.M), relative)

    def test_kernels_compiled_per_instruction_set_keep_their_names_to_themselves(self):
        # Two families that define equal names in HWY_NAMESPACE are merged by the linker: one then runs the other's code.
        for path in sources():
            text = path.read_text(encoding="utf-8")
            if path.suffix == ".cc" and "hwy/foreach_target.h" in text:
                self.assertRegex(text, r"::HWY_NAMESPACE \{\s*namespace \{", path.relative_to(ROOT))


if __name__ == "__main__":
    unittest.main(argv=sys.argv)
