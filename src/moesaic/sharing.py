"""Results on the hub."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from moesaic import report
from moesaic.errors import MoesaicError
from moesaic.io.headers import mapping_of
from moesaic.io.layout import CARD, RECIPE, RECORD, placed
from moesaic.io.names import check_repository
from moesaic.io.trust import check_file
from moesaic.record import Record
from moesaic.result import Result
from moesaic.types import Named

WEIGHTS = ("model.safetensors*", "model-*-of-*.safetensors")
"""Files of an earlier result in the repository, which would be loaded beside a new one's."""


def push(result: Named, repo: str, *, token: str | bool | None = None) -> str:
    """Upload a result, with its card, to a repository of the hub, which is made if there is none.

    Args:
        result: what a verb returned, or the folder that it was saved to.
        repo: ``owner/name``.
        token: of the hub; None for the one that HF_TOKEN or ``hf auth login`` gives.

    Returns:
        the repository's address.

    Raises:
        MoesaicError: nothing can be uploaded, or nothing of that kind is in the folder.
    """
    check_repository(repo, token)
    if isinstance(result, Result):
        with TemporaryDirectory(prefix="moesaic-") as place:
            folder = result.save_pretrained(Path(place) / repo.rpartition("/")[2])
            return push(folder, repo, token=token)
    if not isinstance(result, str | Path):
        raise MoesaicError(
            f"push takes a Result or its folder; got {type(result).__name__}, whose own "
            "push_to_hub uploads it without a card."
        )
    folder = Path(result).expanduser()
    for file in sorted(folder.rglob("*")):
        check_file(file, folder)  # what a link leads to would be uploaded
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        record = Record.from_json(mapping_of(placed(folder, RECORD)))
        recipe = placed(folder, RECIPE).read_text("utf-8")
    except (MoesaicError, ValueError, OSError) as error:
        raise MoesaicError(f"{folder} is not a result of ours: {error}") from error
    title, hub = f"{report.title(record)}, by moesaic", HfApi(token=token)
    try:
        repo = hub.create_repo(repo, exist_ok=True).repo_id
        hub.upload_folder(
            repo_id=repo,
            folder_path=folder,
            ignore_patterns=[CARD],
            delete_patterns=[*WEIGHTS],
            commit_message=title,
        )
        card = report.model_card(record, recipe, repo)  # which names the repository
        hub.upload_file(path_or_fileobj=card.encode(), path_in_repo=CARD, repo_id=repo)
    except (HfHubHTTPError, OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()
        raise MoesaicError(
            f"push {repo!r} failed ({type(error).__name__}: {reason[0] if reason else '':.160}). "
            f"The result is in {folder}."
        ) from error
    return f"{hub.endpoint}/{repo}"
