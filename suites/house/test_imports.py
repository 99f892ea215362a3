"""What may be imported when: start-up stays light, and pure rooms stay pure."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = (
    "numpy",
    "onnx",
    "onnxruntime",
    "tokenizers",
    "nxrt",
    "gguf",
    "safetensors",
    "yaml",
    "rich",
    "jinja2",
    "torch",
    "transformers",
)


def modules_after(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter has loaded after `statement`."""
    code = f"{statement}\nimport sys\nprint('\\n'.join({{name.partition('.')[0] for name in sys.modules}}))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(run.stdout.split())


@pytest.mark.parametrize(
    "module",
    [
        "harness.cli",
        "harness.models",
        "harness.package",
        "harness.ports",
        "harness.pytest_plugin",
        "harness.topology.resolve",
        "harness.topology.sidecar",
    ],
)
def test_rooms_that_must_be_light_import_nothing_heavy(module: str) -> None:
    """The command, the plugin, ports, packages and topology load no numerics, runtime or terminal library."""
    loaded = modules_after(f"import {module}")
    assert "harness" in loaded
    assert loaded.isdisjoint(HEAVY)


def test_deriving_a_topology_loads_neither_numpy_nor_a_runtime() -> None:
    """A whole `derive` run, sources read and documents printed, stays in the standard library."""
    loaded = modules_after(
        "import json, sys, pathlib, tempfile\n"
        "from harness.cli.app import run\n"
        "f = pathlib.Path(tempfile.mkdtemp()) / 'ports.json'\n"
        "port = lambda n, s: {'name': n, 'dtype': 'int64', 'shape': s}\n"
        "f.write_text(json.dumps({'ports': {'inputs': [port('input_ids', ['b', 's'])], 'outputs': []}}))\n"
        "sys.stdout = open('/dev/null' if sys.platform != 'win32' else 'nul', 'w')\n"
        "run(['derive', '--json', str(f)])\n"
        "sys.stdout = sys.__stdout__"
    )
    assert loaded.isdisjoint({"numpy", "onnx", "onnxruntime", "tokenizers"})


def test_the_oracle_never_loads_a_runtime_under_test() -> None:
    """An oracle that shared a runtime with the candidate would prove nothing."""
    assert modules_after("import harness.oracle").isdisjoint({"onnxruntime", "nxrt"})
