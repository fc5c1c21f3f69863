"""Metrics: what they count, and that the dashboard in docs/ asks for nothing else."""

import json
import re
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from serving.config import ServerConfig
from tests.fakes import FakeService
from tests.live import serving
from tests.serving.jobs import submit, tasks, until
from tests.test_server import draw

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = ROOT / "docs" / "grafana" / "bishop.json"


def scraped(http: httpx.Client) -> dict[str, list[dict[str, str]]]:
    """Labels of every series by the name of its samples."""
    found: dict[str, list[dict[str, str]]] = {}
    for family in text_string_to_metric_families(http.get("/metrics").text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(dict(sample.labels))
    return found


def value(http: httpx.Client, series: str) -> float:
    lines = http.get("/metrics").text.splitlines()
    (line,) = [line for line in lines if line.startswith(f"{series} ")]
    return float(line.split()[-1])


def test_policies_and_lines_are_counted(http: httpx.Client) -> None:
    draw(http, n=2, policy="diagonal", sparsity=0.5)
    batch = until(http, submit(http, tasks(3))["id"])
    assert batch["status"] == "completed"
    assert value(http, 'bishop:policy_images_total{policy="diagonal"}') == 2
    assert value(http, 'bishop:policy_kv_read_bytes_total{policy="diagonal"}') == 2000
    assert value(http, 'bishop:policy_kv_resident_bytes_total{policy="dense"}') == 6000
    assert value(http, 'bishop:policy_tokens_total{policy="dense"}') == 48
    assert value(http, 'bishop:batch_lines_total{outcome="completed"}') == 3
    assert value(http, "bishop:batch_line_seconds_count") == 3
    assert value(http, "bishop:batch_lines_running") == 0
    assert value(http, "bishop:e2e_request_latency_seconds_count") == 1


def test_addresses_of_clients_become_no_labels(http: httpx.Client) -> None:
    for id in range(5):
        http.get(f"/v1/files/file-{id}")
        http.get(f"/nowhere/{id}")
    routes = {labels["route"] for labels in scraped(http)["bishop:http_requests_total"]}
    assert routes <= {"/v1/files/{id}", "unknown", "/metrics"}


def expressions(node: Any) -> list[str]:
    if isinstance(node, dict):
        mine = [node["expr"]] if "expr" in node else []
        return mine + expressions(list(node.values()))
    if isinstance(node, list):
        return [expression for each in node for expression in expressions(each)]
    return []


def test_the_dashboard_asks_for_what_there_is(config: ServerConfig) -> None:
    with serving(FakeService(), config) as url, httpx.Client(base_url=url) as http:
        draw(http)
        draw(http, stream=True)
        until(http, submit(http, tasks(1))["id"])
        known = scraped(http)
    dashboard = json.loads(DASHBOARD.read_text())
    asked = expressions(dashboard)
    assert len(asked) > 15
    for expression in asked:
        for name in re.findall(r"bishop:[a-z0-9_]+", expression):
            assert name in known or name == "bishop:requests_rejected_total", name
        for group in re.findall(r"by \(([^)]*)\)", expression):
            names = re.findall(r"bishop:[a-z0-9_]+", expression)
            labels = {label for name in names for series in known.get(name, []) for label in series}
            wanted = {label.strip() for label in group.split(",")}
            assert wanted <= labels | {"reason"}, expression
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in dashboard["panels"]]
    assert len(set(places)) == len(places)


def test_the_dashboard_shows_every_metric_of_the_service(config: ServerConfig) -> None:
    with serving(FakeService(), config) as url, httpx.Client(base_url=url) as http:
        families = text_string_to_metric_families(http.get("/metrics").text)
        names = {each.name for each in families if not each.name.endswith("_created")}
    text = DASHBOARD.read_text()
    left_out = {name for name in names if name not in text}
    assert left_out <= {
        "bishop:kv_resident_bytes", "bishop:kv_cache_bytes", "bishop:prompt_tokens",
        "bishop:kv_read_bytes", "bishop:policy_tokens", "bishop:batch_line_seconds",
    }  # fmt: skip
