"""`python -m suites.exporters`: build tiny packages with real exporters, and check them.

`build` and `peers` run in an exporter's environment, `configure` and `check` in ours.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from suites.exporters.recipes import EXPORTERS


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m suites.exporters", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    build = verbs.add_parser("build", help="write packages, and what their source models say")
    build.add_argument("exporter", choices=EXPORTERS)
    build.add_argument("--again", action="store_true", help="also what is built already")
    verbs.add_parser("configure", help="give packages the genai_config.json that is derived from their graph")
    verbs.add_parser("peers", help="let onnxruntime-genai generate from every package that it can load")
    check = verbs.add_parser("check", help="check every package, or those named, and write the matrix")
    check.add_argument("--matrix", type=Path, metavar="FILE.json", help="where the matrix goes")
    check.add_argument("--table", type=Path, metavar="FILE.md", help="where it goes as a table")
    table = verbs.add_parser("table", help="attribute the rows of a matrix anew, as after a new finding")
    table.add_argument("--matrix", type=Path, metavar="FILE.json", required=True)
    table.add_argument("--table", type=Path, metavar="FILE.md", required=True)
    for verb in verbs.choices.values():
        if verb is not table:
            verb.add_argument(
                "--in", dest="folder", type=Path, required=True, metavar="DIR", help="build folder"
            )
            verb.add_argument("--only", nargs="+", default=(), metavar="NAME", help="packages")
    return parser


def main() -> int:
    """Exit status: 1 if a failure has no attribution, or a planted fault not its own; else 0.

    An exporter's failure is a result.
    """
    given = _arguments().parse_args()
    # Each verb imports its own: what runs beside an exporter has not our runtime, and the other way round.
    if given.verb == "build":
        from suites.exporters.building import build

        build(given.exporter, given.folder, only=given.only, again=given.again)
    elif given.verb == "peers":
        from suites.exporters.peers import write_peers

        write_peers(given.folder, only=given.only)
    elif given.verb == "configure":
        from suites.exporters.configuring import configure

        configure(given.folder, only=given.only)
    elif given.verb == "check":
        from suites.exporters.checking import check
        from suites.exporters.table import matrix_of, merged, text_of

        rows = list(check(given.folder, only=given.only))
        if given.only and given.matrix is not None and given.matrix.is_file():
            rows = merged(json.loads(given.matrix.read_text(encoding="utf-8"))["rows"], rows)
        matrix = matrix_of(rows)
        if given.matrix is not None:
            given.matrix.write_text(text_of(matrix), encoding="utf-8")
        if given.table is not None:
            _write_table(given.table, matrix)
        misjudged = [row for row in matrix["rows"] if row["planted"] and row["attribution"] != "exporter"]
        return int(bool(misjudged) or any(row["attribution"] == "unknown" for row in matrix["rows"]))
    else:
        from suites.exporters.attribution import attribute
        from suites.exporters.table import matrix_of, text_of

        rows = json.loads(given.matrix.read_text(encoding="utf-8"))["rows"]
        for row in rows:
            row["attribution"], row["evidence"] = attribute(row)
        matrix = matrix_of(rows)
        given.matrix.write_text(text_of(matrix), encoding="utf-8")
        _write_table(given.table, matrix)
    return 0


def _write_table(path: Path, matrix: Mapping[str, Any]) -> None:
    """Put the table behind the mark in `path`; what a person wrote before it stays."""
    from suites.exporters.table import MARK, table_of

    written = path.read_text(encoding="utf-8").partition(MARK)[0] if path.is_file() else ""
    path.write_text(f"{written}{MARK}\n{table_of(matrix)}", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
