"""The cluster in docs/kuberay.yaml: YAML, with flags that `bishop serve` has."""

from typing import Any

import yaml

import cli
from benchmarks.results_writer import ROOT


def test_its_flags_exist(capsys: Any) -> None:
    cluster = yaml.safe_load((ROOT / "docs" / "kuberay.yaml").read_text())
    assert cluster["kind"] == "RayCluster"
    (front,) = [
        each
        for each in cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"]
        if each["name"] == "bishop"
    ]
    assert front["command"] == ["bishop", "serve"]
    assert cli.main(["serve", "--help"]) == 0
    known = capsys.readouterr().out
    for flag in front["args"]:
        assert flag.partition("=")[0] in known
