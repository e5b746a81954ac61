"""Run the tests that touch transformers on several versions of it, each in a fresh virtual environment.

    python tests/versions.py                                      # every version that is promised
    python tests/versions.py 5.2.0 5.24.0/2.9.1 --tests test_api.py -- -n auto -k llama

A version is TRANSFORMERS or TRANSFORMERS/TORCH; everything else is installed as constraints.txt pins it. What follows
-- goes to pytest. Prints a Markdown table; exits with 1 if any check failed, ran no test or could not be installed.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
import tempfile
import venv
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
MATRIX = "methods --matrix"
CHECKS = """test_api.py test_cache.py test_conformance.py test_faults.py test_generic.py test_mapped_cache.py
    test_native_parity.py test_reading.py test_cli.py test_hosts.py test_raw_methods.py test_patterns.py
    test_finetune.py""".split()


@dataclass(frozen=True)
class Result:
    """What came of one check: how many tests, and whether all is well."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    good: bool = False

    def __str__(self) -> str:
        return f"{'' if self.good else '**failed** '}{self.passed} / {self.failed} / {self.skipped}"


def result_of(output: str, exit_code: int) -> Result:
    """Read pytest's last line; a run that has none, or in which no test passed, is not good whatever its exit code."""
    lines = [line for line in output.splitlines() if re.search(r" in [\d.]+s\b", line)]
    found = {name: int(count) for count, name in re.findall(r"(\d+) ([a-z]+)", lines[-1])} if lines else {}
    passed = found.get("passed", 0)
    failed = found.get("failed", 0) + found.get("error", 0) + found.get("errors", 0)
    return Result(passed, failed, found.get("skipped", 0), exit_code == 0 and passed > 0 and failed == 0)


def table(results: dict[str, dict[str, Result]]) -> str:
    """Checks down, versions across; each cell is passed / failed / skipped, empty where nothing was run."""
    checks = list(dict.fromkeys(check for column in results.values() for check in column))
    rows = [["passed / failed / skipped", *results], ["---"] * (len(results) + 1)]
    rows += [[f"`{check}`", *(str(column.get(check, "")) for column in results.values())] for check in checks]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def promised() -> list[str]:
    """The tested versions of transformers, from the file that knows them: read, not imported."""
    for line in ast.parse((ROOT / "patches" / "_compat.py").read_text()).body:
        if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "TESTED":
            return list(ast.literal_eval(line.value)["transformers"])
    raise SystemExit("patches/_compat.py has no TESTED")


def install(folder: Path, version: str) -> Path | None:
    """The Python of a new environment with the project and these versions; None where pip found no way."""
    transformers, _, torch = version.partition("/")
    wanted = {"transformers": transformers, **({"torch": torch} if torch else {})}
    free = {*wanted, "tokenizers"}  # transformers says itself which tokenizers it takes
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.split("==")[0] not in free]
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join([*pins, *(f"{name}=={pin}" for name, pin in wanted.items())]))
    venv.create(folder / "env", with_pip=True)
    python = folder / "env" / "bin" / "python"
    command = [python, "-m", "pip", "install", "--quiet", "-c", constraints, "-e", f"{ROOT}[test]"]
    return python if subprocess.run(command).returncode == 0 else None


def run(python: Path, check: str, more: list[str]) -> Result:
    """One test file, or the matrix of methods (where a refused pair counts as skipped), in that environment."""
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/{check}", *more]
    command = [python.with_name("rope-ext"), *MATRIX.split()] if check == MATRIX else [python, *words]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if check == MATRIX:
        passed, failed, refused = (done.stdout.count(f"| {word}") for word in ("ok (", "**FAILED**", "refused"))
        found = Result(passed, failed, refused, done.returncode == 0 and passed > 0)
    else:
        found = result_of(done.stdout, done.returncode)
    if not found.good:
        print(done.stdout)
    return found


def measure(versions: list[str], checks: list[str], more: list[str], keep_going: bool) -> dict[str, dict[str, Result]]:
    """Every check on every version, up to the first failure unless told to keep going."""
    results: dict[str, dict[str, Result]] = {}
    for version in versions:
        column = results.setdefault(version, {})
        with tempfile.TemporaryDirectory() as folder:
            python = install(Path(folder), version)
            for check in checks if python else ["pip install"]:
                column[check] = run(python, check, more) if python else Result()
                print(f"{version} {check}: {column[check]}", file=sys.stderr, flush=True)
                if not (column[check].good or keep_going):
                    return results
    return results


def main(arguments: list[str]) -> int:
    own, more = arguments, []
    if "--" in arguments:
        cut = arguments.index("--")
        own, more = arguments[:cut], arguments[cut + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", default=promised(), metavar="TRANSFORMERS[/TORCH]")
    parser.add_argument("--tests", nargs="+", default=[*CHECKS, MATRIX], metavar="FILE", help=f"or {MATRIX!r}")
    parser.add_argument("--keep-going", action="store_true", help="go on after a check that failed")
    given = parser.parse_args(own)
    results = measure(given.versions, given.tests, more, given.keep_going)
    print(table(results))
    return 0 if all(result.good for column in results.values() for result in column.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
