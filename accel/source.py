"""Where a model's files are: the demo in the package, a folder, or the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError: of whichever client it uses
    GatedRepoError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    XetDownloadError,
)

from decodestep.accel.errors import ModelError

DEMO_FOLDER = Path(__file__).parent / "demo_model"

_HUB_NAME = re.compile(r"(?P<id>\w[\w.-]*/[\w.-]+)(?:@(?P<revision>.+))?", re.ASCII)
_FILES = ["*.json", "*.safetensors", "*.jinja", "merges.txt", "tokenizer.*", "*.tiktoken"]
_FOLDERS = ["*/*"]  # other formats and copies that a repository may hold; no part of the model


def resolve_model(name: str) -> Path:
    """Folder of a model, which is fetched if it is not here.

    `name` is `demo`, a folder, or a hub id `org/name` with an optional `@revision` (branch, tag or commit). A
    folder of that name wins over the hub. huggingface_hub's cache and environment variables hold: HF_HOME,
    HF_HUB_CACHE, HF_HUB_OFFLINE, HF_ENDPOINT, HF_TOKEN.

    Raises ModelError saying what was tried and what to do.
    """
    if name == "demo":
        return DEMO_FOLDER
    try:
        path = Path(name).expanduser()
    except RuntimeError:  # ~someone, who has no home here
        path = Path(name)
    if path.is_dir():
        return path
    if path.is_file():
        raise ModelError(name, [f"it is a file: name the folder that holds it, {path.parent}"])
    hub = _HUB_NAME.fullmatch(name)
    if hub is None:
        raise ModelError(
            name, [f"there is no folder {path.absolute()}: expected demo, a folder or a hub id org/name"]
        )
    return _fetch(name, hub["id"], hub["revision"])


def _fetch(name: str, repo_id: str, revision: str | None) -> Path:
    try:
        return Path(
            snapshot_download(
                repo_id,
                revision=revision,
                allow_patterns=_FILES,
                ignore_patterns=_FOLDERS,
                library_name="decodestep",
            )
        )
    except (HTTPError, HFValidationError, XetDownloadError, OSError) as error:
        problem = f"there is no folder {Path(name).absolute()}, and {_explain(error, repo_id, revision)}"
        raise ModelError(name, [problem]) from error


def _explain(error: Exception, repo_id: str, revision: str | None) -> str:
    """What the hub said and what to do about it."""
    hub = constants.ENDPOINT
    if isinstance(error, GatedRepoError):
        return f"{repo_id} on {hub} is gated: accept its terms there and set HF_TOKEN"
    if isinstance(error, RevisionNotFoundError):
        return f"{repo_id} on {hub} has no revision {revision}: name a branch, a tag or a commit"
    if isinstance(error, RepositoryNotFoundError):
        return f"{hub} has no model {repo_id}, or it is private: check the name, or set HF_TOKEN"
    if isinstance(error, LocalEntryNotFoundError):
        model = repo_id if revision is None else f"{repo_id}@{revision}"
        if constants.HF_HUB_OFFLINE or isinstance(error.__cause__, OfflineModeIsEnabled):
            why, remedy = "HF_HUB_OFFLINE forbids to fetch it", "unset HF_HUB_OFFLINE"
        else:
            why, remedy = f"{hub} cannot be reached ({_one_line(error.__cause__ or error)})", "connect to it"
        cache = constants.HF_HUB_CACHE
        return f"{model} is not complete in the cache {cache} and {why}: {remedy}, or name a folder"
    return f"fetching {repo_id} from {hub} failed: {_one_line(error)}"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
