"""Eleven engines at their worst in one run of pytest, as somebody's own tests would meet them.

Each has the verdict and the exit code of what it does, none takes the run down or another along, and nothing
of them is left: no process, not even a daemon, no file, no shared memory, also where the run is killed. Nine
are checked; the two that break a relation between decodes are `conform`'s to find, in a test of the same run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import jsonschema
import psutil
import pytest

from fixtures.decoders import TinyDecoder

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="isolation needs POSIX signals")

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads((ROOT / "reports/schemas/parity-1.schema.json").read_text(encoding="utf-8"))
DECODER = TinyDecoder(layers="ar", seed=3)
PROMPTS = ((1, 2, 3), (4,))
TOKENS = 6
MARK = "ONNX_PARITY_TEST_RUN"


@dataclass(frozen=True)
class Planted:
    """An engine and what is found.

    Attributes:
        does: what it does, as `fixtures.misbehaving` has it.
        verdict: of the report and of each prompt.
        exit_code: of the command.
        failure: what the report says of the end of its process, where that is known.
    """

    does: str
    verdict: str
    exit_code: int
    failure: tuple[tuple[str, Any], ...] = ()


ENGINES = {
    "segfault at step 3": Planted(
        "segfault,at=3,starts=daemon", "crashed", 4, (("kind", "crashed"), ("step", 3), ("signal", "SIGSEGV"))
    ),
    "abort at creation": Planted(
        "abort,when=open", "crashed", 4, (("kind", "crashed"), ("step", None), ("signal", "SIGABRT"))
    ),
    "hang": Planted("hang,at=2", "timeout", 4, (("kind", "timeout"), ("step", 2), ("limit", "call 5 s"))),
    "memory eater": Planted(
        "eat,at=1", "crashed", 4, (("kind", "crashed"), ("step", 1), ("limit", "memory 600 MiB"))
    ),
    "lacks an operator": Planted("lack,when=open", "unsupported", 4, (("kind", "unsupported"),)),
    "megabytes on both streams": Planted("noise,at=1,starts=daemon", "identical", 0),
    "NaN": Planted("nan,at=2", "divergent", 1),
    "random": Planted("random", "nondeterministic", 1),
    "runs elsewhere": Planted("elsewhere,when=open", "invalid-run", 6),
}

RELATIONS = {
    "keeps state": ("keeps-state", "second-generation"),
    "leaks rows": ("leaks-rows", "batch"),
}
"""What an engine of `fixtures.unrelated` does, and the one of these two relations that it breaks."""

SCHEMA_OF_RELATIONS = json.loads(
    (ROOT / "reports/schemas/conformance-1.schema.json").read_text(encoding="utf-8")
)

TESTS = """
import pytest

from harness.cli.app import run

@pytest.mark.parametrize("name", {engines!r})
def test_engine(parity, name):
    does, patience = {engines!r}[name]
    parity.check(
        "package", candidate=f"misbehaving:does={{does}}", prompts={prompts!r}, max_new_tokens={tokens},
        call_timeout=patience, memory_limit="600MiB",
    )

@pytest.mark.parametrize("name", {relations!r})
def test_relation(name):
    does, _ = {relations!r}[name]
    assert run([
        "conform", "package", f"--engine=unrelated:breaks={{does}}", "--prompt-ids=1,5,3,9",
        "--relation=second-generation", "--relation=batch", f"--report-dir={reports}/{{does}}",
    ]) == 0
"""

INSTALLED = """
[onnx_parity.engines]
misbehaving = fixtures.misbehaving:ENGINE
unrelated = fixtures.unrelated:ENGINE
"""


@dataclass(frozen=True)
class Project:
    """Somebody's project, its environment, and the folders that a run may and may not leave things in."""

    folder: Path
    environment: dict[str, str]

    @property
    def temporary(self) -> Path:
        """Where temporary files go; pytest keeps its own elsewhere."""
        return self.folder / "temporary"

    @property
    def reports(self) -> Path:
        """Where the reports are kept."""
        return self.folder / "kept"

    def start(self, *options: str) -> subprocess.Popen[str]:
        """A run of pytest, all on its own."""
        command = [sys.executable, "-m", "pytest", "-q", "--junitxml=junit.xml", "-p", "no:cacheprovider"]
        own = [f"--basetemp={self.folder / 'base'}", f"--parity-report-dir={self.reports}"]
        return subprocess.Popen(
            [*command, *own, *options],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def processes(self) -> list[psutil.Process]:
        """Everything alive that was started in this environment, whoever its parent is now."""
        found = []
        for process in psutil.process_iter():
            try:
                same = process.environ().get(MARK) == self.environment[MARK]
                if same and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:  # another user's, or gone meanwhile
                continue
        return found

    def documents(self) -> dict[str, dict[str, Any]]:
        """The reports by the name of their engine, each valid."""
        found = {}
        for case in ET.parse(self.folder / "junit.xml").iter("testcase"):
            if case.attrib["name"].startswith("test_relation"):
                continue
            name = case.attrib["name"].removeprefix("test_engine[").removesuffix("]")
            properties = {p.attrib["name"]: p.attrib["value"] for p in case.iter("property")}
            document = json.loads(Path(properties["parity_report"]).read_text(encoding="utf-8"))
            jsonschema.validate(document, SCHEMA)
            found[name] = document
        return found

    def relations(self, does: str) -> dict[str, Any]:
        """The report of relations on an engine, valid."""
        path = self.reports / does / "conformance.json"
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        jsonschema.validate(document, SCHEMA_OF_RELATIONS)
        return document


def shared_memory() -> set[str]:
    """Named shared memory that no living process has open or mapped."""
    names = {str(path) for path in Path("/dev/shm").glob("*")}
    if not names:  # also where the system has no such folder, nor maps of memory to look at
        return names
    for process in psutil.process_iter():
        try:
            names -= {entry.path for entry in process.memory_maps(grouped=True)}
            names -= {file.path for file in process.open_files()}
        except psutil.Error:
            continue
    return names


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    """A package, the engine installed, and a test for each thing that it does; all ended afterwards."""
    (tmp_path / "package").mkdir()
    DECODER.save(tmp_path / "package/model.onnx")
    installed = tmp_path / "site/planted-1.0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: planted\nVersion: 1.0\n", encoding="utf-8"
    )
    (installed / "entry_points.txt").write_text(INSTALLED, encoding="utf-8")
    # Whoever does not hang has all the time that a busy machine may take.
    engines = {
        name: (planted.does, 5 if planted.verdict == "timeout" else 120) for name, planted in ENGINES.items()
    }
    engines["hang for good"] = "hang-native,at=2,starts=daemon", 3600
    (tmp_path / "test_engines.py").write_text(
        TESTS.format(
            engines=engines, prompts=PROMPTS, tokens=TOKENS, relations=RELATIONS, reports=tmp_path / "kept"
        ),
        encoding="utf-8",
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("ONNX_PARITY_", "ORT_", "PYTEST_")) or name == "ONNX_PARITY_CACHE_DIR"
    }
    paths = [str(tmp_path / "site"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    made = Project(
        tmp_path,
        environment
        | {
            MARK: uuid.uuid4().hex,
            "PYTHONPATH": os.pathsep.join(paths),
            "TMPDIR": str(tmp_path / "temporary"),
        },
    )
    made.temporary.mkdir()
    yield made
    for process in made.processes():
        process.kill()


def test_each_engine_has_its_verdict_and_nothing_of_it_is_left(project: Project) -> None:
    """The tokens from before a failure are those of the decoder's own reference."""
    shared = shared_memory()
    run = project.start("-k", "not good")
    out, _ = run.communicate(timeout=600)

    assert run.returncode == pytest.ExitCode.TESTS_FAILED, out
    assert "1 passed" in out
    assert "INTERNALERROR" not in out
    documents = project.documents()
    assert set(documents) == set(ENGINES)
    for name, planted in ENGINES.items():
        document = documents[name]
        found = document["verdict"], document["exit_code"], document["candidate"]["process"]
        assert found == (planted.verdict, planted.exit_code, "isolated"), name
        failure = document["candidate"]["failure"]
        assert (failure is None) == (not planted.failure), name
        assert all(failure[fact] == value for fact, value in planted.failure), name
        reported = [prompt["verdict"] for prompt in document["prompts"]]
        assert reported == ([] if planted.exit_code == 6 else [planted.verdict] * len(PROMPTS)), name
        if failure is not None:
            for ids, prompt in zip(PROMPTS, document["prompts"], strict=True):
                assert prompt["candidate_ids"] == list(DECODER.greedy(ids, failure["step"] or 0)), name
    assert documents["NaN"]["prompts"][0]["first_divergence"]["index"] == 2
    assert "NaN" in documents["NaN"]["prompts"][0]["first_divergence"]["evidence"]
    for does, relation in RELATIONS.values():
        document = project.relations(does)
        assert (document["verdict"], document["exit_code"]) == ("broken", 1), does
        assert document["engine"]["process"] == "isolated"
        broken = [each["name"] for each in document["relations"] if each["outcome"] == "broken"]
        assert (len(document["relations"]), broken) == (2, [relation])
    assert f"{len(ENGINES) - 1 + len(RELATIONS)} failed" in out

    assert project.processes() == []
    assert list(project.temporary.iterdir()) == []
    kept = {path.name for path in project.reports.rglob("*") if path.is_file()}
    assert kept == {"parity.json", "conformance.json"}
    assert shared_memory() <= shared


def test_killing_the_run_leaves_nothing_either(project: Project) -> None:
    """A worker that hangs deep in C ends with its parent, whose report reads as interrupted."""
    shared = shared_memory()
    run = project.start("-k", "good")
    deadline = time.monotonic() + 120
    while not (reports := list(project.reports.rglob("parity.json"))):
        assert run.poll() is None, run.communicate()[0]
        assert time.monotonic() < deadline, "no check has begun"
        time.sleep(0.05)
    time.sleep(1.0)  # until the worker is deep in its call
    assert len(project.processes()) == 4  # the run, a keeper, its worker and the daemon
    run.kill()
    run.communicate(timeout=60)

    while project.processes():
        assert time.monotonic() < deadline, "a process outlives the run"
        time.sleep(0.05)
    (report,) = reports
    document = json.loads(report.read_text(encoding="utf-8"))
    jsonschema.validate(document, SCHEMA)
    assert (document["exit_code"], document["interrupted"]) == (130, True)
    assert [path.name for path in report.parent.iterdir()] == ["parity.json"]
    assert list(project.temporary.iterdir()) == []
    assert shared_memory() <= shared
