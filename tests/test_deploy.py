"""The examples in deploy/: their syntax, and that names, ports, volumes and files in them agree. Nothing is started."""

import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rmq_spark.datasource.options.option_table import CONNECTION_OPTIONS, OPTIONS, SINK_OPTIONS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"
DOCUMENTS = sorted(DEPLOY.rglob("*.yaml"))
RULES = "{extends: default, rules: {line-length: {max: 120}}}"


def load(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_yamllint_finds_nothing(path: Path) -> None:
    pytest.importorskip("yamllint", reason="yamllint is not installed")
    from yamllint import config, linter

    assert not list(linter.run(path.read_text(), config.YamlLintConfig(RULES)))


def test_kubernetes_accepts_every_field() -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed").validate
    for name in ("namespace", "spark", "stream"):
        for part in load(f"kubernetes/{name}.yaml"):
            validate(part, "1.31", strict=True)


def test_compose_uses_only_what_it_declares() -> None:
    (compose,) = load("compose/compose.yaml")
    services = compose["services"]
    assert set(services) == {"namesrv", "broker", "spark-master", "spark-worker", "jupyter"}
    for name, service in services.items():
        assert set(service["networks"]) <= set(compose["networks"]), name
        assert set(service.get("depends_on", [])) <= set(services), name
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert source in compose["volumes"] or (DEPLOY / "compose" / source).exists(), f"{name}: {source}"
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), f"{name} publishes {port} to other machines"
        if "build" in service:
            assert (DEPLOY / "compose" / service["build"]["context"] / service["build"]["dockerfile"]).exists()
        needs = service.get("depends_on", {})
        for needed in needs if isinstance(needs, dict) else {}:
            is_ready = needs[needed]["condition"] == "service_started" or "healthcheck" in services[needed]
            assert is_ready, f"{name} waits for the health of {needed}"


def test_the_broker_of_compose_registers_under_the_name_of_its_service() -> None:
    (compose,) = load("compose/compose.yaml")
    lines = (DEPLOY / "compose" / "broker.conf").read_text().splitlines()
    settings = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    assert settings["brokerIP1"] in compose["services"]
    assert settings["namesrvAddr"].split(":")[0] in compose["services"]
    mounts = [volume.split(":")[1] for volume in compose["services"]["broker"]["volumes"]]
    assert settings["storePathRootDir"] in mounts
    assert settings["storePathCommitLog"].startswith(settings["storePathRootDir"])


def test_kubernetes_selects_the_pods_that_it_creates() -> None:
    (kustomization,) = load("kubernetes/kustomization.yaml")
    objects = [part for name in kustomization["resources"] for part in load(f"kubernetes/{name}")]
    workloads = {part["metadata"]["name"]: part for part in objects if part["kind"] in ("Deployment", "StatefulSet")}
    services = {part["metadata"]["name"]: part for part in objects if part["kind"] == "Service"}
    maps = {part["name"] for part in kustomization["configMapGenerator"]}
    for name, part in workloads.items():
        pod = part["spec"]["template"]
        assert part["spec"]["selector"]["matchLabels"] == pod["metadata"]["labels"], name
        assert pod["spec"]["enableServiceLinks"] is False, f"{name}: SPARK_MASTER_PORT would be a URL"
        declared = {volume["name"] for volume in pod["spec"].get("volumes", [])}
        declared |= {claim["metadata"]["name"] for claim in part["spec"].get("volumeClaimTemplates", [])}
        for container in pod["spec"]["containers"]:
            assert container["image"] in {image["name"] for image in kustomization["images"]}
            assert {mount["name"] for mount in container.get("volumeMounts", [])} == declared, name
        assert {
            volume["configMap"]["name"] for volume in pod["spec"].get("volumes", []) if "configMap" in volume
        } <= maps
    for name, service in services.items():
        labels = workloads[service["spec"]["selector"]["app"]]["spec"]["template"]
        ports = {port["containerPort"] for c in labels["spec"]["containers"] for port in c["ports"]}
        assert {port["port"] for port in service["spec"]["ports"]} <= ports, name
    for part in kustomization["configMapGenerator"]:
        assert all((DEPLOY / "kubernetes" / file).exists() for file in part["files"])


def test_the_program_of_kubernetes_uses_what_its_pod_has() -> None:
    text = (DEPLOY / "kubernetes" / "orders_stream.py").read_text()
    compile(text, "orders_stream.py", "exec")
    (stateful,) = [part for part in load("kubernetes/stream.yaml") if part["kind"] == "StatefulSet"]
    (container,) = stateful["spec"]["template"]["spec"]["containers"]
    assert set(re.findall(r'os\.environ\["(\w+)"\]', text)) == {variable["name"] for variable in container["env"]}
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    (checkpoint,) = re.findall(r'"checkpointLocation", "([^"]+)"', text)
    assert any(checkpoint.startswith(f"{mount}/") for mount in mounts)
    known = {option.name for option in (*CONNECTION_OPTIONS, *OPTIONS, *SINK_OPTIONS)} | {"checkpointLocation"}
    assert set(re.findall(r'\.option\("(\w+)"', text)) <= known


@pytest.mark.spark
def test_the_condition_of_the_program_of_kubernetes_fails_on_no_body(spark: "SparkSession") -> None:
    text = (DEPLOY / "kubernetes" / "orders_stream.py").read_text()
    (condition,) = re.findall(r'orders\.where\("(.*)"\)', text)
    large = ['{"amount": 1000}', '{"amount": 1250.50}', '{"amount": "1000.00"}']
    others = ['{"amount": 999.99}', '{"amount": "many"}', '{"amount": null}', "{}", "not JSON", ""]
    rows = spark.createDataFrame([(body.encode(),) for body in [*large, *others]], ["body"])
    assert spark.conf.get("spark.sql.ansi.enabled") == "true"
    assert [row.body for row in rows.where(condition).selectExpr("string(body) AS body").collect()] == large


@pytest.mark.parametrize(("count", "expected"), [(1, "one-1.whl[spark,cli,pandas,plot] jupyterlab"), (2, None)])
def test_the_image_installs_the_only_wheel(tmp_path: Path, count: int, expected: str | None) -> None:
    text = (DEPLOY / "image" / "Dockerfile").read_text()
    (script,) = re.findall(r"^RUN (set -- (?:.*\\\n)*.*)$", text, re.MULTILINE)
    for number in range(1, count + 1):
        (tmp_path / f"one-{number}.whl").touch()
    script = script.replace("/opt/wheels", str(tmp_path)).replace("pip install --no-cache-dir", "echo")
    ran = subprocess.run(["sh", "-c", script], capture_output=True, text=True)
    if expected is None:
        assert (ran.returncode, ran.stdout) == (1, "")
        assert "cannot choose a wheel: dist/ has" in ran.stderr
    else:
        assert ran.stdout == f"{tmp_path}/{expected}\n"


def test_the_readme_says_that_nothing_was_run() -> None:
    assert "**These files were not run.**" in (DEPLOY / "README.md").read_text()
