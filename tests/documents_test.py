#!/usr/bin/env python3
"""Documents name what exists: every relative link, and every `path` in backquotes that looks like one of ours.

Run by CTest and by hand: python3 tests/documents_test.py.
"""
import pathlib
import re
import subprocess
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent
TOP = ("service/", "proto/", "engine/", "kernels/", "deploy/", "clients/", "tests/", "docs/", ".ci/", "./deploy/", "./tests/")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")


def documents() -> list[pathlib.Path]:
    names = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "*.md"], cwd=ROOT, text=True,
                           capture_output=True, check=True).stdout.split()
    return [ROOT / name for name in names]


def missing(document: pathlib.Path, text: str) -> list[str]:
    """Returns the links and paths in `text` that lead nowhere; placeholders (<x>, …, *) are not paths."""
    lost = []
    for target in LINK.findall(text):
        if re.match(r"[a-z]+:|#", target):
            continue
        if not (document.parent / target.split("#")[0]).exists():
            lost.append(target)
    for code in CODE.findall(text):
        word = code.split()[0].rstrip(",.:;")
        if word.startswith(TOP) and not re.search(r"[<>*…{}$]|\.\.\.", word) and not (ROOT / word).exists():
            lost.append(word)
    return lost


class DocumentsTest(unittest.TestCase):

    def test_links_and_paths_in_documents_exist(self):
        found = [f"{document.relative_to(ROOT)}: {target}" for document in documents()
                 for target in missing(document, document.read_text(encoding="utf-8"))]
        self.assertEqual(found, [], "\n" + "\n".join(found))

    def test_tables_of_the_readme_are_what_the_results_say(self):
        check = subprocess.run([sys.executable, ROOT / "tests/bench/readme_tables.py", "--check"], text=True,
                               capture_output=True, check=False)
        self.assertEqual(check.returncode, 0, check.stdout + check.stderr)

    def test_what_is_generated_from_the_results_is_what_they_say(self):
        for script in ("speed_table.py", "speedup_picture.py"):
            check = subprocess.run([sys.executable, ROOT / "tests/bench" / script, "--check"], text=True,
                                   capture_output=True, check=False)
            self.assertEqual(check.returncode, 0, check.stdout + check.stderr)

    def test_addresses_of_the_server_need_no_hosts_file(self):
        # gRPC's resolver (c-ares) does not know the name localhost where there is no /etc/hosts, as in a bare root.
        named = subprocess.run(["git", "grep", "-nE", "localhost:(\\$|800[12])", "--", ":!tests"], cwd=ROOT, text=True,
                               capture_output=True, check=False).stdout
        self.assertEqual(named, "")

    def test_a_lost_path_is_found(self):
        self.assertTrue(missing(ROOT / "README.md", "see `engine/nowhere.h`"))
        self.assertTrue(missing(ROOT / "README.md", "see [this](nowhere.md)"))
        self.assertFalse(missing(ROOT / "README.md", "see `engine/tensor/tensor.h` and [licence](LICENSE)"))


if __name__ == "__main__":
    unittest.main()
