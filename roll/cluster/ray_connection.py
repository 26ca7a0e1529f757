"""The connection to Ray: joins the configured cluster or starts Ray on this machine, and lists the nodes' resources."""

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

from roll.cluster.upload import NOT_SENT, excluded, too_large_error
from roll.config.errors import UserError
from roll.config.secrets import resolved
from roll.config.user_code import SENT_FOLDER

if TYPE_CHECKING:
    from roll.config.schema import RayConfig  # an actor does not need what only a config's reader does

_QUERY_S = 60.0
_CONNECT_S = 5.0
"""Deadline for reaching the configured address; Ray itself would retry for minutes."""
_TOO_LARGE = re.compile(r"Package size \(.*?\) exceeds the maximum size of [\d.]+\s?\w+")


@dataclass(frozen=True)
class NodeResources:
    """A node of the cluster with its resources as Ray reports them."""

    id: str
    host: str
    address: str
    cores: int
    gpus: int
    memory_bytes: int
    gpu_bytes: int
    """Memory of its smallest GPU, 0 if unknown."""


_INIT_ERRORS = (ConnectionError, ValueError, RuntimeError, TimeoutError, RayError)
"""What `ray.init` raises if it cannot join or start a cluster."""


def connect(config: RayConfig, root: str = "") -> None:
    """Joins the cluster at the config's address, or starts Ray on this machine without one. `root` is the folder of the
    user's code, which is copied to the nodes of a joined cluster."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    settings: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if config.address is None:
        settings |= {"address": "local", "include_dashboard": False}
        # Ray's processes end this long after their head has died, also if it was killed. The limit applies to this
        # process too, which needs some of that time for an orderly end.
        os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "30")
        if config.object_store_gb:
            settings["object_store_memory"] = int(config.object_store_gb * 2**30)
        environment = resolved(config.runtime_env, "ray.runtime_env")
    else:
        _check_reachable(config.address)
        settings["address"] = config.address
        environment = _with_code(resolved(config.runtime_env, "ray.runtime_env"), root)
    try:
        ray.init(**settings, runtime_env=environment or None)
    except Exception as error:
        # Ray raises a bare Exception if its node has not started within 30 s.
        if type(error) is not Exception and not isinstance(error, _INIT_ERRORS):
            raise
        if (found := _TOO_LARGE.search(str(error))) is not None and "working_dir" in environment:
            raise too_large_error(Path(environment["working_dir"]), found[0]) from error
        where = "on this machine" if config.address is None else f"at ray.address={config.address!r}"
        token = (
            "; a cluster that asks for a token needs RAY_AUTH_MODE=token and that token here" if config.address else ""
        )
        raise UserError(f"Ray could not be reached or started {where}: {error}{token}") from error


def this_node() -> str:
    """Id of this process's node."""
    here: str = ray.get_runtime_context().get_node_id()
    return here


def node_resources() -> list[NodeResources]:
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
    """Names of the nodes for messages, by node id; numbered as in a device map."""
    return {
        node["NodeID"]: f"node{number} ({node['NodeManagerHostname']}, {node['NodeManagerAddress']})"
        for number, node in enumerate(_alive())
    }


def head_address() -> str:
    """Address of the head of the connected cluster."""
    address: str = ray.get_runtime_context().gcs_address
    return address


def _alive() -> list[dict[str, Any]]:
    here = this_node()
    alive = [node for node in ray.nodes() if node["Alive"]]
    alive.sort(key=lambda node: (node["NodeID"] != here, node["NodeManagerAddress"], node["NodeID"]))
    return alive


def _check_reachable(address: str) -> None:
    """Raises `UserError` if nothing listens at a host:port address. Ray itself checks other forms of addresses."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return
    if host in ("localhost", "127.0.0.1", "::1"):
        host = ray.util.get_node_ip_address()  # a cluster on this machine listens at this address
    try:
        # waits: its second argument is the limit
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise UserError(f"nothing answers at ray.address={address!r} ({error}): is Ray running there?") from error


def _with_code(user_environment: Mapping[str, Any], root: str) -> dict[str, Any]:
    """A runtime environment with the code for workers; settings in `user_environment` take precedence."""
    code = _code_for_workers(root)
    variables = {**code.get("env_vars", {}), **user_environment.get("env_vars", {})}
    if "working_dir" in user_environment:
        variables.pop(SENT_FOLDER, None)  # the user chose the workers' folder
    lines = [*code.get("excludes", ()), *user_environment.get("excludes", ())]
    return {**code, **user_environment, **({"excludes": lines} if lines else {}), "env_vars": variables}


def _code_for_workers(root: str = "") -> dict[str, Any]:
    """The runtime environment that copies this package and the user's code to the nodes: the working directory if the
    root is in it, else the root; and this package if it is elsewhere and not installed. Empty for a Ray job, which
    already has its environment."""
    if "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ:
        return {}
    folder, package = _folder_to_send(Path(root) if root else Path.cwd()), Path(__file__).parents[1]
    env: dict[str, Any] = {"working_dir": str(folder), "excludes": excluded(folder)}
    env["env_vars"] = {SENT_FOLDER: str(folder)}
    if not _is_installed(package) and not package.is_relative_to(folder):
        env["py_modules"] = [str(package)]
    return env


def _folder_to_send(root: Path) -> Path:
    """The folder to copy: the working directory, which may contain code that the root imports, if the root is in it and
    not excluded; else the root. If the root is in the code folder that a run keeps, that whole folder: run folders are
    excluded from the working directory."""
    for folder in (root, *root.parents):
        if folder.name == "files" and (folder.parent / "manifest.json").is_file():
            return folder
    here = Path.cwd()
    within = root.is_relative_to(here) and not set(root.relative_to(here).parts) & set(NOT_SENT)
    return here if within else root


def _is_installed(package: Path) -> bool:
    return any(part in ("site-packages", "dist-packages") for part in package.parts)


def _gpu_bytes(node: str) -> int:
    """Queries a node for the memory of its smallest GPU."""
    task = ray.remote(_ask_driver_for_memory).options(
        num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
    )
    try:
        found: int = ray.get(task.remote(), timeout=_QUERY_S)
    except RayError:
        return 0
    return found


def _ask_driver_for_memory() -> int:
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_QUERY_S).stdout
    except (OSError, subprocess.SubprocessError):
        return 0
    return min((int(line) << 20 for line in output.split() if line.isdigit()), default=0)
