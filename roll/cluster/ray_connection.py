"""The connection to Ray: joining the cluster the config names, or starting Ray here, and what its nodes have."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from roll.cluster.upload import NOT_SENT, excluded, too_large
from roll.config.errors import UserError
from roll.config.secrets import resolved
from roll.config.user_code import SENT_FOLDER

if TYPE_CHECKING:
    from roll.config.schema import RayConfig  # an actor does not need what only a config's reader does

_FACTS_S = 60.0
_REACH_S = 5.0
"""Ray itself tries for minutes to reach an address nobody listens at."""
_TOO_LARGE = re.compile(r"Package size \(.*?\) exceeds the maximum size of [\d.]+\s?\w+")


@dataclass(frozen=True)
class NodeResources:
    """A node of the cluster as Ray counts it."""

    id: str
    host: str
    address: str
    cores: int
    gpus: int
    memory_bytes: int
    gpu_bytes: int
    """Memory of each GPU, 0 if it could not be found out."""


def connect(config: RayConfig, root: str = "") -> None:
    """Joins the cluster at the config's address, or starts Ray on this machine if it names none. `root` is the folder of
    the user's code, which the nodes of a cluster get a copy of."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    settings: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if config.address is None:
        settings |= {"address": "local", "include_dashboard": False}
        # What Ray has started here ends within seconds after its head has, also when that was killed. This process has
        # the same limit, and needs some of it to end in order.
        os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "30")
        if config.object_store_gb:
            settings["object_store_memory"] = int(config.object_store_gb * 2**30)
        environment = resolved(config.runtime_env, "ray.runtime_env")
    else:
        _reach(config.address)
        settings["address"] = config.address
        environment = _with_code(resolved(config.runtime_env, "ray.runtime_env"), root)
    try:
        ray.init(**settings, runtime_env=environment or None)
    except (ConnectionError, ValueError, RuntimeError, TimeoutError, RayError) as error:
        if (found := _TOO_LARGE.search(str(error))) is not None and "working_dir" in environment:
            raise too_large(Path(environment["working_dir"]), found[0]) from error
        where = "on this machine" if config.address is None else f"at ray.address={config.address!r}"
        token = (
            "; a cluster that asks for a token needs RAY_AUTH_MODE=token and that token here" if config.address else ""
        )
        raise UserError(f"Ray could not be reached or started {where}: {error}{token}") from error


def this_node() -> str:
    """Id of the node this process is on."""
    here: str = ray.get_runtime_context().get_node_id()
    return here


def node_facts() -> list[NodeResources]:
    """The cluster's nodes: this one first, then by address and id."""
    return [
        NodeResources(
            id=node["NodeID"],
            host=node["NodeManagerHostname"],
            address=node["NodeManagerAddress"],
            cores=int(node["Resources"].get("CPU", 0)),
            gpus=int(node["Resources"].get("GPU", 0)),
            memory_bytes=int(node["Resources"].get("memory", 0) + node["Resources"].get("object_store_memory", 0)),
            gpu_bytes=_gpu_bytes(node["NodeID"]) if node["Resources"].get("GPU") else 0,
        )
        for node in _alive()
    ]


def node_names() -> dict[str, str]:
    """How messages call the nodes, by their ids: counted as in a device map."""
    return {
        node["NodeID"]: f"node{number} ({node['NodeManagerHostname']}, {node['NodeManagerAddress']})"
        for number, node in enumerate(_alive())
    }


def head_address() -> str:
    """Where the head of the cluster that is joined listens."""
    address: str = ray.get_runtime_context().gcs_address
    return address


def _alive() -> list[dict[str, Any]]:
    here = this_node()
    alive = [node for node in ray.nodes() if node["Alive"]]
    alive.sort(key=lambda node: (node["NodeID"] != here, node["NodeManagerAddress"], node["NodeID"]))
    return alive


def _reach(address: str) -> None:
    """Refuses an address nobody listens at. What names none is Ray's to judge."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return
    if host in ("localhost", "127.0.0.1", "::1"):
        host = ray.util.get_node_ip_address()  # where a cluster of this machine listens
    try:
        # waits: its second argument is the limit
        socket.create_connection((host.strip("[]"), int(port)), _REACH_S).close()
    except (OSError, OverflowError) as error:
        raise UserError(f"nothing answers at ray.address={address!r} ({error}): is Ray running there?") from error


def _with_code(given: Mapping[str, Any], root: str) -> dict[str, Any]:
    """A runtime environment with the code for workers; what is `given` counts."""
    code = _code_for_workers(root)
    variables = {**code.get("env_vars", {}), **given.get("env_vars", {})}
    if "working_dir" in given:
        variables.pop(SENT_FOLDER, None)  # the user says what the workers' folder is
    lines = [*code.get("excludes", ()), *given.get("excludes", ())]
    return {**code, **given, **({"excludes": lines} if lines else {}), "env_vars": variables}


def _code_for_workers(root: str = "") -> dict[str, Any]:
    """How the nodes of a cluster get this code and the user's: the working directory if the root is in it, or else the
    root; and this package if it is elsewhere and not installed. A job that Ray runs has its environment already."""
    if "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ:
        return {}
    folder, package = _folder_to_send(Path(root) if root else Path.cwd()), Path(__file__).parents[1]
    env: dict[str, Any] = {"working_dir": str(folder), "excludes": excluded(folder)}
    env["env_vars"] = {SENT_FOLDER: str(folder)}
    if not _is_installed(package) and not package.is_relative_to(folder):
        env["py_modules"] = [str(package)]
    return env


def _folder_to_send(root: Path) -> Path:
    """The working directory, which may hold code that the root's refers to, if the root is in it and is sent with it. Of
    the code that a run keeps, all of it: runs are not sent."""
    for folder in (root, *root.parents):
        if folder.name == "files" and (folder.parent / "manifest.json").is_file():
            return folder
    here = Path.cwd()
    within = root.is_relative_to(here) and not set(root.relative_to(here).parts) & set(NOT_SENT)
    return here if within else root


def _is_installed(package: Path) -> bool:
    return any(part in ("site-packages", "dist-packages") for part in package.parts)


def _gpu_bytes(node: str) -> int:
    """Asks a node for the memory of its smallest GPU."""
    task = ray.remote(_ask_driver_for_memory).options(
        num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
    )
    try:
        found: int = ray.get(task.remote(), timeout=_FACTS_S)
    except RayError:
        return 0
    return found


def _ask_driver_for_memory() -> int:
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_FACTS_S).stdout
    except (OSError, subprocess.SubprocessError):
        return 0
    return min((int(line) << 20 for line in said.split() if line.isdigit()), default=0)
