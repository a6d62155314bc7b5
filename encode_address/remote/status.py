"""`encode-address remote status`: whether the server can be reached, what it runs, and which hybrid models it has."""

from __future__ import annotations

import time
from typing import Any

from encode_address.errors import ModelError
from encode_address.models import loading
from encode_address.models.families import family_of, refuse
from encode_address.models.layout import Layout
from encode_address.remote.client import Client
from encode_address.run.engine import versions

PACKAGES = ("nnsight", "torch", "transformers")  # a difference in these can change names or numbers
WAIT = 60.0  # seconds for an answer


def status() -> str:
    """A screen about the server that nnsight is set to. Raises ServerError where it cannot be reached."""
    client, until = Client(), time.monotonic() + WAIT
    deployments = client.http("GET", "/status", until).json().get("deployments", {})
    there = client.http("GET", "/env", until).json()
    lines = [f"NDIF at {client.host}: up", *_versions(there), ""]
    repos: dict[tuple[str, str | None], list[str]] = {}
    for one in deployments.values():
        repos.setdefault((one["repo_id"], one.get("revision")), []).append(one.get("application_state", "?"))
    hybrids = {key: line for key in sorted(repos, key=str) if (line := _hybrid(*key))}
    for (repo, revision), line in hybrids.items():
        states = sorted({state.lower() for state in repos[repo, revision]})
        lines.append(f"  {repo}{f'@{revision}' if revision else ''}  {', '.join(states)}  {line}")
    if not hybrids:
        lines.append("  no hybrid model is up; one that is asked for may be brought up on demand")
    if others := len(repos) - len(hybrids):
        lines.append(f"  {others} other model{'s' if others > 1 else ''}")
    return "\n".join(lines)


def _versions(there: dict[str, Any]) -> list[str]:
    ours, packages = versions(), there.get("packages", {})
    lines = []
    for name in PACKAGES:
        theirs = str(packages.get(name, "unknown"))
        same = theirs.partition("+")[0] == ours[name].partition("+")[0]
        lines.append(f"  {name:<13} {theirs}{'' if same else f' (here {ours[name]})'}")
    return lines


def _hybrid(repo: str, revision: str | None) -> str:
    """What a hosted model is, if it is a hybrid that can be read; else ""."""
    name = repo.removeprefix(f"{loading.HUB}/")
    try:
        folder = loading.bundled_folder(name)
        config = loading.read_config(repo, str(folder or repo), revision)
        refuse(config, repo)
        layout = Layout.from_config(config.get_text_config(), repo)
        kinds = f"{len(layout.linear_layers)} linear and {len(layout.softmax_layers)} softmax layers"
        return f"{family_of(config, repo).name}, {kinds}"
    except ModelError:
        return ""
