"""Models by the name that they have on a hub: Qwen/Qwen3-30B-A3B, owner/name:Q4_K_M.

What is in the hub's cache on this machine is used as it is, without a network. Else the files that
are read are downloaded into it, by huggingface_hub: several at once, with bars, going on where an
earlier download stopped. HF_HOME, HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE count as everywhere.
Importing this imports no torch and no transformers, so that a mistyped name is refused at once.
"""

from __future__ import annotations

import errno
import json
import re
import shutil
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pykernels.errors import PykernelsError

from .startup.given import CONFIG, check_given

NAME = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?::(?P<part>[\w./-]+))?")
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
TEXTS = (
    *(CONFIG, "generation_config.json", "chat_template.jinja", "chat_template.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("tokenizer.model", "tiktoken.model", "vocab.json", "merges.txt"),
)
"""Files beside the weights that are read."""
_SPLIT = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
_ROOM = "Free some space, or set HF_HOME to a folder with more"
_HINT = "Give the folder of a downloaded checkpoint, a GGUF file, or a name: Qwen/Qwen3-30B-A3B"


def local(model: str | Path, weights: bool = True) -> Path:
    """Where a model is: a path as it is, a name of the hub as its folder or GGUF file here.

    Args:
        model: a path; or "owner/name", of whose files the safetensors are read; or
            "owner/name:PART", where PART is the name of a GGUF file or a part of it, as Q4_K_M.
        weights: False: where there are only safetensors to be had, config.json is enough.

    Raises:
        PykernelsError: neither a path nor a model of the hub; a path that is no model
            (``given.check_given``); one of the hub that is not here and cannot be downloaded.
    """
    path, name = Path(model), NAME.fullmatch(str(model))
    if path.exists():
        check_given(path, weights)
        return path
    if name is None or Path(name["repo"]).parent.is_dir():
        kind = "file" if path.suffix == ".gguf" else "folder"
        raise PykernelsError(f"There is no {kind} {path}", _HINT)
    repo, part = name["repo"], name["part"]
    folder = _cached(repo, part, True)
    if folder is None and not weights:
        folder = _cached(repo, part, False)
    return folder or _download(repo, part, weights)


def name_of(path: Path) -> str:
    """What a model is called: its folder or file, or where it is in the hub's cache its name."""
    for folder in path.absolute().parents:
        if folder.name == "snapshots" and folder.parent.name.startswith("models--"):
            return folder.parent.name.removeprefix("models--").replace("--", "/")
    return path.resolve().name


def _cached(repo: str, part: str | None, weights: bool) -> Path | None:
    """Where a model is that was downloaded before, if all of it is."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    cache = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo, repo_type="model")
    try:
        revision = (cache / "refs" / "main").read_text().strip()
    except OSError:
        return None
    folder = cache / "snapshots" / revision
    here = {str(f.relative_to(folder)): 0 for f in folder.rglob("*") if f.is_file()}
    try:
        wanted = _wanted(repo, part, here, _shards(folder / INDEX), weights)
    except PykernelsError:
        return None
    return _at(folder, wanted) if all(file in here for file in wanted) else None


def _wanted(
    repo: str, part: str | None, files: Mapping[str, Any], shards: Iterable[str], weights: bool
) -> list[str]:
    """The names of the files of a model, those of GGUF in order.

    Args:
        files: of the repository; ``shards``: of its index.

    Raises:
        PykernelsError: it has no weights that can be read, or several models.
    """
    if part is None and CONFIG in files:
        found = [SINGLE] if SINGLE in files else [INDEX, *shards] if INDEX in files else []
        if found or not weights:
            texts = [name for name in TEXTS if name in files]
            return [*texts, *found] if weights else [CONFIG]
    models: dict[str, list[str]] = {}
    for name in sorted(files):
        split = _SPLIT.fullmatch(name)
        if name.lower().endswith(".gguf") and "mmproj" not in name.lower():
            models.setdefault(split["stem"] if split else name, []).append(name)
    if part is not None:
        word = re.compile(rf"(?:^|[-._/]){re.escape(part)}(?:[-./]|$)", re.IGNORECASE)
        models = {
            stem: names for stem, names in models.items() if part in names or word.search(stem)
        }
    if len(models) != 1:
        what = f"GGUF models of {part!r}" if part else "GGUF models"
        some = ", ".join(Path(names[0]).name for names in list(models.values())[:3])
        none = f"{repo} has neither {SINGLE} nor {INDEX} nor a GGUF file"
        raise PykernelsError(
            f"{repo} has {len(models)} {what}: {some}"
            if models
            else f"{repo} has no {what}"
            if part
            else none,
            f"Name one, as {repo}:Q4_K_M or {repo}:FILE.gguf" if models or part else _HINT,
        )
    (names,) = models.values()
    split = _SPLIT.fullmatch(names[0])
    if split and len(names) != int(split["count"]):
        raise PykernelsError(
            f"{repo} has {len(names)} of the {int(split['count'])} files of {names[0]}",
            "Name another one",
        )
    return names


def _shards(index: Path) -> list[str]:
    """The files that an index names; none where it is not there."""
    try:
        return sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return []


def _at(folder: Path, files: list[str]) -> Path:
    """What loading is given: the GGUF file, of a split set the first one, or the folder; or
    config.json, where that is all."""
    alone = files[0].lower().endswith(".gguf") or files == [CONFIG]
    return folder / files[0] if alone else folder


def _download(repo: str, part: str | None, weights: bool) -> Path:
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download
    from huggingface_hub import errors as hub

    try:
        info = HfApi().model_info(repo, files_metadata=True)  # tried once, others for half a minute
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
        index = Path()
        if part is None and INDEX in sizes and SINGLE not in sizes and weights:
            index = Path(hf_hub_download(repo, INDEX))
        files = _wanted(repo, part, sizes, _shards(index), weights)
        _check_room(repo, sum(sizes.get(file, 0) for file in files))
        exact = [re.sub(r"([*?[])", r"[\1]", file) for file in files]
        return _at(Path(snapshot_download(repo, allow_patterns=exact)), files)
    except hub.GatedRepoError:
        raise PykernelsError(
            f"{repo} is given only to those who have accepted its terms",
            "Accept them on its page, then: hf auth login",
        ) from None
    except (hub.RepositoryNotFoundError, hub.HFValidationError):
        raise PykernelsError(
            f"There is no folder {repo}, and the hub has no model of that name",
            "Check the name; for a private model: hf auth login",
        ) from None
    except PykernelsError:
        raise
    except Exception as error:  # without a network each library raises its own types
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise PykernelsError(f"{repo} cannot be downloaded: {error.strerror}", _ROOM) from error
        raise _unreached(repo, part, error) from error


def _unreached(repo: str, part: str | None, error: Exception) -> PykernelsError:
    """What to do without a network."""
    include = f" --include '*{part.removesuffix('.gguf')}*'" if part else ""
    why = " ".join(str(error).split())[:200] or type(error).__name__
    return PykernelsError(
        f"{repo} is not in the hub's cache on this machine, and cannot be downloaded: {why}",
        f"Where there is a network: hf download {repo}{include} --local-dir {Path(repo).name};"
        " then give that folder",
    )


def _check_room(repo: str, nbytes: int) -> None:
    """Says what is downloaded; raises where the disk has no room for it."""
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    there = next(folder for folder in (cache, *cache.parents) if folder.is_dir())
    free = shutil.disk_usage(there).free
    if nbytes > free:
        raise PykernelsError(
            f"{repo} has {nbytes / 1e9:.1f} GB, and {there} has {free / 1e9:.1f} GB free",
            _ROOM,
        )
    warnings.warn(f"downloading {repo}, {nbytes / 1e9:.2f} GB, into {cache}", stacklevel=4)
