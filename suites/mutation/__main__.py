"""`python -m suites.mutation`: run the mutants and write the kill matrix; `tox -e mutation` does it."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import click

from suites.mutation.matrix import kill_matrix, summary_of
from suites.mutation.named import NamedMutant, Verdict, named_mutants, run_mutant, run_unmutated
from suites.mutation.syntactic import declared_equivalents, mutmut_version, run_syntactic
from suites.mutation.tree import ROOT, copy_tree


@click.command()
@click.option("--named/--no-named", default=True, help="Mutants that a person wrote.")
@click.option("--syntactic/--no-syntactic", default=True, help="Mutants that mutmut writes.")
@click.option("--match", default="", help="Only named mutants with this text in their name.")
@click.option("--only", multiple=True, help="Only syntactic mutants whose name matches; may be repeated.")
@click.option("--children", default=2, show_default=True, help="Syntactic mutants tested at a time.")
@click.option("--keep-kills", is_flag=True, help="While writing tests: test again what is not yet killed.")
@click.option(
    "--work",
    type=click.Path(path_type=Path),
    default=ROOT / ".tox" / "mutants",
    show_default=True,
    help="Where mutmut keeps its copy and its results, so that it can resume.",
)
@click.option(
    "--report",
    type=click.Path(path_type=Path),
    default=ROOT / "reports" / "mutation.json",
    show_default=True,
)
def main(
    *,
    named: bool,
    syntactic: bool,
    match: str,
    only: tuple[str, ...],
    children: int,
    keep_kills: bool,
    work: Path,
    report: Path,
) -> None:
    """Change our own derivation in many small ways, and see that a test notices each of them.

    Exit status: 0 if every mutant is killed or declared equivalent, 1 otherwise.
    """
    document = kill_matrix(
        named=_run_named(match) if named else None,
        syntactic=run_syntactic(work, only=only, children=children, keep_kills=keep_kills)
        if syntactic
        else None,
        equivalents=declared_equivalents(),
        tool=f"mutmut {mutmut_version()}" if syntactic else "",
        kept_kills=keep_kills,
    )
    report.parent.mkdir(parents=True, exist_ok=True)
    report.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for line in summary_of(document):
        click.echo(line)
    click.echo(f"kill matrix: {report}")
    sys.exit(0 if document["ok"] else 1)


def _run_named(match: str) -> list[tuple[NamedMutant, Verdict]]:
    mutants = [mutant for mutant in named_mutants() if match in mutant.name]
    if not mutants:
        raise click.UsageError(f"No named mutant has {match!r} in its name.")
    with tempfile.TemporaryDirectory(prefix="onnx-parity-mutants-") as folder:
        tree = Path(folder)
        copy_tree(tree)
        if run_unmutated(tree, mutants).status != "survived":
            raise click.ClickException("The named tests do not pass on the source as it is.")
        results = []
        for mutant in mutants:
            verdict = run_mutant(tree, mutant)
            click.echo(f"{verdict.status}: {mutant.name}", err=True)
            results.append((mutant, verdict))
        return results


if __name__ == "__main__":
    main()
