"""Check manifests for KubeRay before `kubectl apply`: unknown fields, and what does not fit together.

    uv run tools/check_manifest.py deploy/kuberay/rayjob.yaml

The API server drops unknown fields in silence, so that a typo costs a job its retries or its deadline. The classes have
every field of `RayJob` and `RayCluster` (ray.io/v1, KubeRay 1.5), and of pods those that a training run has use for.
Exit status 0: all files are sound; 2: one line per problem, with its file and line.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from nemo_rl.config.errors import ConfigError, Location, Problem
from nemo_rl.config.loader import build_config
from nemo_rl.config.rules import Rules, StrictModel, accepted_by
from nemo_rl.config.sources import read_documents, walk


def quantity(value: int | str) -> None:
    """Raise ValueError unless `value` is a number of Kubernetes: `8`, `"500m"`, `1200Gi`."""
    if re.fullmatch(r"\d+(\.\d+)?(m|[kMGTPE]i?)?", str(value)) is None:
        raise ValueError("a quantity of Kubernetes is a number and a unit without a space: 8, 500m, 1200Gi")


Quantity = Annotated[int | str, accepted_by(quantity)]
Name = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", max_length=63)]
Labels = dict[str, str]
Count = Annotated[int, Field(ge=0)]


class Metadata(StrictModel):
    name: Name | None = None
    generateName: str | None = None
    namespace: Name | None = None
    labels: Labels = Field(default_factory=dict)
    annotations: Labels | None = None


class Resources(StrictModel):
    requests: dict[str, Quantity] | None = None
    limits: dict[str, Quantity] = Field(default_factory=dict)


class EnvVar(StrictModel):
    name: str
    value: str | None = None
    valueFrom: dict[Literal["secretKeyRef", "configMapKeyRef", "fieldRef", "resourceFieldRef"], Any] | None = None


class Reference(StrictModel):
    name: Name
    optional: bool = False


class EnvFrom(StrictModel):
    secretRef: Reference | None = None
    configMapRef: Reference | None = None
    prefix: str | None = None


class VolumeMount(StrictModel):
    name: Name
    mountPath: Annotated[str, Field(pattern="^/")]
    subPath: str | None = None
    readOnly: bool = False


class Container(StrictModel):
    name: Name
    image: str
    imagePullPolicy: Literal["Always", "IfNotPresent", "Never"] | None = None
    command: list[str] | None = None
    args: list[str] | None = None
    workingDir: str | None = None
    env: list[EnvVar] | None = None
    envFrom: list[EnvFrom] | None = None
    ports: list[dict[Literal["name", "containerPort", "hostPort", "protocol"], str | int]] | None = None
    resources: Resources = Resources()
    volumeMounts: list[VolumeMount] = Field(default_factory=list)
    securityContext: dict[str, Any] | None = None
    lifecycle: dict[Literal["preStop", "postStart"], Any] | None = None
    livenessProbe: dict[str, Any] | None = None
    readinessProbe: dict[str, Any] | None = None
    startupProbe: dict[str, Any] | None = None


class ClaimVolume(StrictModel):
    claimName: Name
    readOnly: bool = False


class Volume(StrictModel):
    name: Name
    persistentVolumeClaim: ClaimVolume | None = None
    emptyDir: dict[Literal["medium", "sizeLimit"], str] | None = None
    hostPath: dict[Literal["path", "type"], str] | None = None
    nfs: dict[Literal["server", "path", "readOnly"], str | bool] | None = None
    configMap: dict[str, Any] | None = None
    secret: dict[str, Any] | None = None
    csi: dict[str, Any] | None = None


class PodSecurity(StrictModel):
    runAsNonRoot: bool | None = None
    runAsUser: Count | None = None
    runAsGroup: Count | None = None
    fsGroup: Count | None = None
    fsGroupChangePolicy: Literal["Always", "OnRootMismatch"] | None = None
    supplementalGroups: list[int] | None = None
    seccompProfile: dict[str, str] | None = None


class PodSpec(StrictModel):
    containers: Annotated[list[Container], Field(min_length=1)]
    initContainers: list[Container] = Field(default_factory=list)
    volumes: list[Volume] = Field(default_factory=list)
    restartPolicy: Literal["Always", "OnFailure", "Never"] | None = None
    securityContext: PodSecurity = PodSecurity()
    nodeSelector: Labels | None = None
    tolerations: list[dict[Literal["key", "operator", "value", "effect", "tolerationSeconds"], str | int]] | None = None
    affinity: dict[Literal["nodeAffinity", "podAffinity", "podAntiAffinity"], Any] | None = None
    topologySpreadConstraints: list[dict[str, Any]] | None = None
    imagePullSecrets: list[Reference] | None = None
    serviceAccountName: Name | None = None
    priorityClassName: Name | None = None
    runtimeClassName: Name | None = None
    schedulerName: Name | None = None
    hostNetwork: bool = False
    hostIPC: bool = False
    dnsPolicy: str | None = None
    terminationGracePeriodSeconds: Count | None = None

    def cross_checks(self) -> Iterator[tuple[str, str]]:
        volumes = {volume.name for volume in self.volumes}
        for container in (*self.initContainers, *self.containers):
            for mount in container.volumeMounts:
                if mount.name not in volumes:
                    yield "volumes", f"container {container.name} mounts {mount.name}, and no volume has that name"


class PodTemplate(StrictModel):
    metadata: Metadata = Metadata()
    spec: PodSpec


class HeadGroup(StrictModel):
    template: PodTemplate
    rayStartParams: Labels | None = None
    headService: dict[str, Any] | None = None
    enableIngress: bool = False
    serviceType: Literal["ClusterIP", "NodePort", "LoadBalancer"] | None = None
    labels: Labels | None = None
    resources: dict[str, str] | None = None


class WorkerGroup(StrictModel):
    groupName: Name
    template: PodTemplate
    replicas: Count = 0
    minReplicas: Count = 0
    maxReplicas: Count = 2**31 - 1
    numOfHosts: Annotated[int, Field(ge=1)] = 1
    rayStartParams: Labels | None = None
    idleTimeoutSeconds: Count | None = None
    scaleStrategy: dict[Literal["workersToDelete"], list[str]] | None = None
    suspend: bool = False
    labels: Labels | None = None
    resources: dict[str, str] | None = None

    rules: ClassVar[Rules] = {
        "minReplicas > {replicas}": "a run has a fixed number of nodes; set minReplicas to replicas={replicas}",
        "maxReplicas < {replicas}": "a run has a fixed number of nodes; set maxReplicas to replicas={replicas}",
    }

    @property
    def num_gpus(self) -> int:
        """GPUs of one pod, as KubeRay counts them for Ray."""
        limits = self.template.spec.containers[0].resources.limits
        return sum(int(number) for name, number in limits.items() if name.endswith("gpu"))


class AuthOptions(StrictModel):
    mode: Literal["token", "disabled"] = "token"
    secretName: Name | None = None
    enableK8sTokenAuth: bool = False


class RayClusterSpec(StrictModel):
    headGroupSpec: HeadGroup
    workerGroupSpecs: list[WorkerGroup] = Field(default_factory=list)
    rayVersion: str | None = None
    authOptions: AuthOptions | None = None
    enableInTreeAutoscaling: bool = False
    autoscalerOptions: dict[str, Any] | None = None
    gcsFaultToleranceOptions: dict[str, Any] | None = None
    headServiceAnnotations: Labels | None = None
    managedBy: Literal["ray.io/kuberay-operator", "kueue.x-k8s.io/multikueue"] | None = None
    upgradeStrategy: dict[Literal["type"], str] | None = None
    suspend: bool = False

    def cross_checks(self) -> Iterator[tuple[str, str]]:
        templates = [self.headGroupSpec.template, *(group.template for group in self.workerGroupSpecs)]
        images = sorted({template.spec.containers[0].image for template in templates})
        if len(images) > 1:
            yield "headGroupSpec", f"head and workers need the same Python and Ray, so one image; there are {images}"


class RayJobSpec(StrictModel):
    entrypoint: str
    rayClusterSpec: RayClusterSpec | None = None
    clusterSelector: Labels | None = None
    backoffLimit: Count = 0
    activeDeadlineSeconds: Annotated[int, Field(ge=1)] | None = None
    preRunningDeadlineSeconds: Annotated[int, Field(ge=1)] | None = None
    shutdownAfterJobFinishes: bool = False
    ttlSecondsAfterFinished: Count = 0
    submissionMode: Literal["K8sJobMode", "HTTPMode", "SidecarMode", "InteractiveMode"] = "K8sJobMode"
    submitterPodTemplate: PodTemplate | None = None
    submitterConfig: dict[Literal["backoffLimit"], int] | None = None
    runtimeEnvYAML: str | None = None
    entrypointNumCpus: float | None = None
    entrypointNumGpus: float | None = None
    entrypointResources: str | None = None
    jobId: str | None = None
    metadata: Labels | None = None
    managedBy: Literal["ray.io/kuberay-operator", "kueue.x-k8s.io/multikueue"] | None = None
    deletionStrategy: dict[str, Any] | None = None
    suspend: bool = False

    def cross_checks(self) -> Iterator[tuple[str, str]]:
        if self.ttlSecondsAfterFinished and not self.shutdownAfterJobFinishes:
            yield "ttlSecondsAfterFinished", "has an effect only with shutdownAfterJobFinishes: true"
        if self.rayClusterSpec is None:
            if self.clusterSelector is None:
                yield "rayClusterSpec", "give it, or clusterSelector for a cluster that runs already"
            return
        groups = [group for group in self.rayClusterSpec.workerGroupSpecs if group.num_gpus]
        pods, gpus = sum(group.replicas * group.numOfHosts for group in groups), {group.num_gpus for group in groups}
        wanted = {key: int(value) for key, value in re.findall(r"\bcluster\.(\w+)=(\d+)", self.entrypoint)}
        if wanted.get("num_nodes", pods) > pods:
            yield "entrypoint", f"cluster.num_nodes={wanted['num_nodes']}, and {pods} pods have GPUs"
        if gpus and wanted.get("gpus_per_node", 0) > min(gpus):
            yield "entrypoint", f"cluster.gpus_per_node={wanted['gpus_per_node']}, and a pod has {min(gpus)}"


class RayJob(StrictModel):
    apiVersion: Literal["ray.io/v1"]
    kind: Literal["RayJob"]
    metadata: Metadata
    spec: RayJobSpec

    def cross_checks(self) -> Iterator[tuple[str, str]]:
        if "kueue.x-k8s.io/queue-name" in self.metadata.labels:
            if not self.spec.shutdownAfterJobFinishes:
                yield (
                    "spec.shutdownAfterJobFinishes",
                    "Kueue wants jobs that delete their cluster; set it to true",
                )
            if self.spec.clusterSelector is not None:
                yield "spec.clusterSelector", "Kueue wants jobs with a cluster of their own; give rayClusterSpec"


class RayCluster(StrictModel):
    apiVersion: Literal["ray.io/v1"]
    kind: Literal["RayCluster"]
    metadata: Metadata
    spec: RayClusterSpec


def check(path: Path) -> list[RayJob | RayCluster]:
    """The manifests for KubeRay in `path`; other documents, such as a volume, are passed over.

    Raises ConfigError with everything that is wrong with the first one that is not sound.
    """
    documents = [tree for tree in read_documents(path) if is_for_kuberay(tree.values)]
    if not documents:
        raise ConfigError([Problem((), "holds no manifest of KubeRay", Location(str(path)))])
    for tree in documents:
        for at, value in walk(tree.values):
            if isinstance(value, str):  # `${NAME}` is of the shell in the pod, no interpolation of a configuration
                tree.get(at[:-1])[at[-1]] = re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    return [build_config(RayCluster if tree.values.get("kind") == "RayCluster" else RayJob, tree) for tree in documents]


def is_for_kuberay(manifest: dict[str, Any]) -> bool:
    return str(manifest.get("apiVersion")).startswith("ray.io/") or str(manifest.get("kind")).startswith("Ray")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    status = 0
    for path in parser.parse_args().files:
        try:
            manifests = check(path)
        except ConfigError as error:
            print(error, file=sys.stderr)
            status = 2
        else:
            print(f"{path}: a sound {' and a sound '.join(manifest.kind for manifest in manifests)}")
    raise SystemExit(status)


if __name__ == "__main__":
    main()
