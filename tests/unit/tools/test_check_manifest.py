"""The manifests of deploy/kuberay: sound as they are, and one clear line for what a user may get wrong in them."""

import shlex
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from nemo_rl.algorithms.config.grpo import GRPOMasterConfig
from nemo_rl.config.errors import ConfigError
from nemo_rl.config.loader import load_config
from tools.check_manifest import RayCluster, RayJob, check

ROOT = Path(__file__).parents[3]
RAYJOB = ROOT / "deploy/kuberay/rayjob.yaml"
SHUTDOWN = "  shutdownAfterJobFinishes: true\n"


def test_the_manifests_describe_the_same_cluster_and_the_command_and_the_ray_of_the_job_fit_this_package():
    [job], [cluster] = check(RAYJOB), check(ROOT / "deploy/kuberay/raycluster.yaml")
    assert isinstance(job, RayJob) and isinstance(cluster, RayCluster)
    assert job.spec.rayClusterSpec == cluster.spec
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (ray,) = [req for text in project["dependencies"] if (req := Requirement(text)).name == "ray"]
    assert cluster.spec.rayVersion in ray.specifier
    words = shlex.split(job.spec.entrypoint)
    assert words[:5] == ["cd", "/opt/nemo-rl", "&&", "uv", "run"], "the image has the clone there"
    assert (ROOT / words[5]).is_file()
    config = load_config(GRPOMasterConfig, ROOT / words[words.index("--config") + 1], words[8:])
    assert config.checkpointing.checkpoint_dir.startswith("/shared/"), "a new cluster finds the checkpoints there"


def test_a_file_may_hold_other_kinds_and_variables_of_the_shell(tmp_path):
    text, manifest = RAYJOB.read_text(), tmp_path / "job.yaml"
    command = r"logger.log_dir=${LOG_ROOT:-/logs}/\${x}$(hostname)"
    volume = "apiVersion: v1\nkind: PersistentVolumeClaim\nspec: {accessModes: [ReadWriteMany]}\n"
    renamed = text.replace("logger.log_dir=/shared/logs/nemo-rl-grpo", command)
    manifest.write_text(f"{volume}---\n# empty\n---\n{renamed}")
    [job] = check(manifest)
    assert isinstance(job, RayJob) and job.spec.entrypoint.endswith(command)
    typo = f"{volume}---\n{text}".replace("backoffLimit", "backofLimit")
    line = 1 + typo.splitlines().index("  backofLimit: 2")
    for content, message in {typo: f"job.yaml:{line}: spec.backofLimit", volume: "no manifest of KubeRay"}.items():
        manifest.write_text(content)
        with pytest.raises(ConfigError, match=message):
            check(manifest)
    with pytest.raises(ConfigError, match=r"cannot be read: .*No such file"):
        check(tmp_path / "jobs.yaml")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("backoffLimit: 2", "backofLimit: 2", "unknown key; the nearest valid key is spec.backoffLimit"),
        ("replicas: 2\n", "replicas: two\n", "spec.rayClusterSpec.workerGroupSpecs.0.replicas"),
        ('num-cpus: "0"', "num-cpus: 0", "rayStartParams.num-cpus"),
        ("memory: 1200Gi", "memory: 1200 GB", "memory"),
        ("maxReplicas: 2", "maxReplicas: 1", "set maxReplicas to replicas=2"),
        ("cluster.num_nodes=2", "cluster.num_nodes=3", "cluster.num_nodes=3, and 2 pods have GPUs"),
        ("gpus_per_node=8", "gpus_per_node=9", "cluster.gpus_per_node=9, and a pod has 8"),
        ("{name: shared, mountPath", "{name: share, mountPath", "ray-head mounts share, and no volume has that name"),
        (SHUTDOWN, "", "has an effect only with shutdownAfterJobFinishes"),
        ("nemo-rl:0.1.0", "nemo-rl:0.2.0", "so one image"),
        ("kind: RayJob", "kind: RayJobs", "RayJob"),
        (f"{SHUTDOWN}  ttlSecondsAfterFinished: 600\n", "", "Kueue wants jobs that delete their cluster"),
    ],
)
def test_a_mistake_is_one_clear_line(tmp_path, old, new, message):
    text, manifest = RAYJOB.read_text(), tmp_path / "job.yaml"
    if "Kueue" in message:
        text = text.replace("  # labels:", "  labels:")
    manifest.write_text(text)
    check(manifest)
    assert old in text
    manifest.write_text(text.replace(old, new, 1))
    with pytest.raises(ConfigError) as error:
        check(manifest)
    (problem,) = error.value.problems
    assert message in str(problem) and str(problem).startswith(f"{manifest}:")
