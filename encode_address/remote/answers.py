"""What a server says when something is wrong, as one line that says what to do."""

from __future__ import annotations

import re
from typing import Any

import httpx

from encode_address.errors import JobTimeout, ServerError

LOGIN = "https://login.ndif.us"
STATUS = "encode-address remote status"


class Told(Exception):
    """All that a server said of a failed job: the cause of the error that the user sees, shown with --debug."""


def unreachable(host: str, why: str) -> ServerError:
    """The server cannot be reached, or says that it cannot serve now."""
    return ServerError(
        f"NDIF at {host} cannot be reached ({why}): try again later (NDIF_HOST names another server); what was finished is kept, "
        "and the same command continues"
    )


def refusal(reply: httpx.Response, host: str) -> ServerError:
    """A request that was answered by an HTTP error which trying again does not mend. Never repeats the key."""
    said, code = detail(reply), reply.status_code
    if code == 401:
        return ServerError(f"NDIF at {host} wants an API key: set NDIF_API_KEY (a key comes from {LOGIN})")
    if code == 400 and "key format" in said:
        return ServerError(f"NDIF_API_KEY is not an API key: set it to the one from {LOGIN} (8-4-4-4-12 characters)")
    if code == 403:
        return ServerError(f"NDIF at {host} does not know this API key: set NDIF_API_KEY to one from {LOGIN}")
    if code == 400 and (
        old := re.search(r"Client (\S+) version (\S+) is below the minimum supported (\S+?)\.?(\s|$)", said)
    ):
        name, ours, least, _ = old.groups()
        return ServerError(
            f"NDIF at {host} serves {name} {least} or newer, and this is {ours}: pip install --upgrade {name}"
        )
    return ServerError(f"NDIF at {host} refused the request ({code}): {said}")


def error(description: str, host: str) -> ServerError:
    """A job that ended in an error. What the server said whole is its cause."""
    found = _error(description.strip(), host)
    found.__cause__ = Told(description)
    return found


def _error(said: str, host: str) -> ServerError:
    line = said.splitlines()[0] if said else "no reason given"
    if late := re.search(r"exceeded the execution timeout of ([\d.]+)\s*s", said):
        return JobTimeout(
            f"a job took longer than the {float(late[1]):g} s that NDIF at {host} gives one, also when it was split: "
            "use fewer pairs (--n), or smaller batches (--batch-tokens)"
        )
    if line.startswith("Could not deploy this model"):
        reason = line.removeprefix("Could not deploy this model").lstrip(". ").rstrip(".")
        return ServerError(f"NDIF at {host} cannot serve this model: {reason or 'no reason given'} (hosted: {STATUS})")
    if lacks := re.search(r"no module at '(?:Module:)?([^']+)'", said):
        return ServerError(
            f"the model on {host} has no module {lacks[1]}, so its packages differ from those here: compare them ({STATUS}) and "
            "install the server's version of transformers"
        )
    if lacks := re.search(r"could not be read \(ModuleNotFoundError: No module named '([^']+)'", said):
        return ServerError(
            f"{host} has no module {lacks[1]}, which the job uses: nnsight.register({lacks[1].split('.')[0]!r}) ships it with the job"
        )
    if "payload could not be read" in said:
        return ServerError(f"{host} cannot read the job: {_clean(line)}; compare the versions ({STATUS})")
    if not said.startswith("Traceback"):
        return ServerError(f"the job failed on {host}: {_clean(line)}")
    last = next(line for line in reversed(said.splitlines()) if line.strip())
    return ServerError(f"the job failed on {host}: {_clean(last)}{_place(said)} (all of it: --debug)")


def _place(traceback: str) -> str:
    """The last frame of this package that a traceback names; else its last frame."""
    frames = re.findall(r'File "([^"]+)", line (\d+), in (\S+)', traceback)
    ours = [frame for frame in frames if "encode_address/" in frame[0]]
    if not frames:
        return ""
    path, line, name = (ours or frames)[-1]
    short = f"encode_address/{path.rpartition('encode_address/')[2]}" if ours else path.rpartition("/")[2]
    return f", in {name} ({short}:{line})"


def detail(reply: httpx.Response) -> str:
    """What an HTTP error says in words."""
    try:
        body: Any = reply.json()
    except ValueError:
        body = reply.text
    said = body.get("detail", body) if isinstance(body, dict) else body
    return _clean(str(said)) or reply.reason_phrase


def first(error: BaseException) -> str:
    """The first line of an exception's message, or its name."""
    lines = str(error).strip().splitlines()
    return _clean(lines[0]) if lines else type(error).__name__


def _clean(text: str) -> str:
    return " ".join(text.split())[:300]
