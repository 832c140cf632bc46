"""Uploads of model folders to a Hugging Face hub, or to another server with the same API (HF_ENDPOINT)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError

from rftstream.config.secrets import hidden
from rftstream.errors import ConfigError, WeightsError

NAME = re.compile(r"[\w.-]+/[\w.-]+")
HEADER = "X-Error-Message"
"""Header in which a hub explains why it refuses a request."""


@dataclass(frozen=True, slots=True)
class HubPlace:
    """A repository on a hub, and a branch of it."""

    name: str
    branch: str | None
    """Name of the branch; None for the repository's default."""


def places_of(text: str, versions: Sequence[int], *, where: str) -> list[HubPlace]:
    """Return the places that OWNER/NAME[@BRANCH] names: one, or a branch for each of several versions.

    ConfigError if the text has another form, or if there is no token: the hub would refuse the upload after all the
    work."""
    name, at, branch = text.partition("@")
    if not NAME.fullmatch(name) or (at and not branch):
        raise ConfigError(f"{where}: got {text!r}, expected OWNER/NAME or OWNER/NAME@BRANCH")
    if at and len(versions) > 1:
        raise ConfigError(
            f"{where}: got one branch for {len(versions)} versions; leave out @{branch}, each gets its own"
        )
    if get_token() is None:
        raise ConfigError(f"{where}: found no token of the hub; export HF_TOKEN, or log in once with `hf auth login`")
    if len(versions) > 1:
        return [HubPlace(name, f"v{version}") for version in versions]
    return [HubPlace(name, branch or None)]


def upload(folder: Path, place: HubPlace, *, private: bool, message: str) -> str:
    """Upload all files of a folder in one commit, and return the commit's address. The repository and the branch are
    made if they do not exist.

    Files that the hub already has are not sent again. WeightsError if the hub refuses or does not answer."""
    api = HfApi(library_name="rftstream")
    options = (f" --revision {place.branch}" if place.branch else "") + (" --private" if private else "")
    again = f"{folder} is complete; send it again with `hf upload {place.name} {folder}{options}`"
    try:
        api.create_repo(place.name, private=private or None, exist_ok=True)
        if place.branch is not None:
            api.create_branch(place.name, branch=place.branch, exist_ok=True)
        done = api.upload_folder(repo_id=place.name, folder_path=folder, revision=place.branch, commit_message=message)
    except HfHubHTTPError as error:
        said = error.response.headers.get(HEADER) or str(error).splitlines()[0]
        raise WeightsError(
            f"{api.endpoint}: refused {place.name} with {error.response.status_code}, {hidden(said)}; {again}"
        ) from None
    except Exception as error:  # the hub's client raises errors of several packages
        raise WeightsError(f"{api.endpoint}: {hidden(f'{type(error).__name__}: {error}')}; {again}") from None
    return str(done.commit_url)
