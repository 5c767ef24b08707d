#!/usr/bin/env python3
"""Adds up JUnit XML files of CTest, GoogleTest and pytest into the closing line `N passed, N failed, N skipped`.

    tests/summarize.py DIRECTORY

A GoogleTest binary writes its own file (one case per test); CTest's file says which binaries ran. A binary that left no
file of its own (a script, or one that crashed before it could write) counts as the one case that CTest saw. What failed in
a folder and passed in the folder of the same name with "-again" counts as passed, and is named as FLAKY.
Exits 1 when anything failed or nothing ran.
"""
import pathlib
import sys
import xml.etree.ElementTree as ElementTree


def cases(path: pathlib.Path):
    """Yields (name, outcome) for each test case of a JUnit file; a file cut short by a crash yields nothing."""
    try:
        root = ElementTree.parse(path).getroot()
    except ElementTree.ParseError:
        return
    for case in root.iter("testcase"):
        name = f"{case.get('classname', '')}.{case.get('name', '')}"
        if case.find("failure") is not None or case.find("error") is not None:
            yield name, "failed"
        elif (case.find("skipped") is not None or case.get("status") in ("notrun", "disabled")
              or case.get("result") in ("skipped", "suppressed")):
            yield name, "skipped"
        else:
            yield name, "passed"


def results(run: pathlib.Path) -> dict[str, list[tuple[str, str]]]:
    """The cases of each binary of a run."""
    ctest = run / "ctest.xml"
    own = {path.stem: list(cases(path)) for path in run.glob("*.xml") if path != ctest}
    for name, outcome in cases(ctest) if ctest.exists() else ():
        binary = name.split(".")[-1]
        seen = own.get(binary)
        # A binary that failed without a failing case of its own (leak at exit, crash) is a failure of its own.
        if not seen or (outcome == "failed" and all(result != "failed" for _, result in seen)):
            own.setdefault(binary, []).append((binary, outcome))
    return own


def main() -> int:
    directory = pathlib.Path(sys.argv[1])
    count = {"passed": 0, "failed": 0, "skipped": 0}
    for run in sorted(directory.iterdir()):  # one folder a run: release, asan, python, …
        if run.name.endswith("-again"):
            continue
        repeated = directory / f"{run.name}-again"
        again = results(repeated) if repeated.is_dir() else {}
        for binary, outcomes in results(run).items():
            passes = bool(again.get(binary)) and all(result != "failed" for _, result in again[binary])
            for name, outcome in outcomes:
                if outcome == "failed":
                    print(f"{'FLAKY' if passes else 'FAILED'} {run.name}: {binary}: {name}")
                count["passed" if outcome == "failed" and passes else outcome] += 1
    skipped = f", {count['skipped']} skipped" if count["skipped"] else ""
    print(f"{count['passed']} passed, {count['failed']} failed{skipped}")
    return 0 if count["failed"] == 0 and count["passed"] > 0 else 1


if __name__ == "__main__":
    sys.exit(main())
