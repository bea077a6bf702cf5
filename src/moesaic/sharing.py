"""Results shared through the hub: the whole checkpoint, or the plan alone as a slim patch."""

from __future__ import annotations

from pathlib import Path

from moesaic import report
from moesaic.errors import MoesaicError
from moesaic.io.headers import mapping_of
from moesaic.io.layout import CARD, PAGE, PICTURE, PLAN_FILES, RECIPE, RECORD, anywhere, placed
from moesaic.io.names import check_repository
from moesaic.io.trust import check_file
from moesaic.plan import Plan
from moesaic.record import Record

PATCH = (*PLAN_FILES, RECORD, RECIPE, PAGE, PICTURE)
"""Files of a result that rebuild it and say what it is, beside its card."""
WEIGHTS = ("model.safetensors*", "model-*-of-*.safetensors")
"""Files of an earlier result in the repository, which would be loaded beside a new one's."""


def push(folder: str | Path, repo: str, *, plan_only: bool = False) -> str:
    """Upload a result, with its card, to a repository of the hub, which is made if there is none.

    Args:
        folder: a result's.
        repo: ``owner/name``.
        plan_only: of its files only the plan, and those that tell of it: ``moesaic apply REPO OUT``
            rebuilds the checkpoint.

    Returns:
        the repository's address.

    Raises:
        MoesaicError: nothing can be uploaded, or nothing of that kind is in the folder.
    """
    folder = Path(folder).expanduser()
    check_repository(repo)
    if plan_only and not all(placed(folder, name).is_file() for name in PLAN_FILES):
        raise MoesaicError(
            f"push_plan: {folder} holds no plan, for its weights were trained. Push it whole."
        )
    for file in sorted(folder.rglob("*")):
        check_file(file, folder)  # what a link leads to would be uploaded
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        record = Record.from_json(mapping_of(placed(folder, RECORD)))
        recipe = placed(folder, RECIPE).read_text("utf-8")
    except (MoesaicError, ValueError, OSError) as error:
        raise MoesaicError(f"{folder} is not a result of ours: {error}") from error
    if plan_only and len(Plan.load(folder).earlier) + 1 < len(record.steps):
        raise MoesaicError(
            f"push_plan: the plan in {folder} does not rebuild the result, for a step before the "
            "last was trained. Push it whole."
        )
    patterns = anywhere(*PATCH) if plan_only else None
    replaced = None if plan_only else [*WEIGHTS]
    hub = HfApi()
    try:
        repo = hub.create_repo(repo, exist_ok=True).repo_id
        card = report.model_card(record, recipe, repo, plan_only)
        title = f"{report.title(record)}, by moesaic"
        hub.upload_file(
            path_or_fileobj=card.encode(),
            path_in_repo=CARD,
            repo_id=repo,
            commit_message=f"Card: {title}",
        )
        hub.upload_folder(
            repo_id=repo,
            folder_path=folder,
            allow_patterns=patterns,
            ignore_patterns=[CARD],
            delete_patterns=replaced,
            commit_message=title,
        )
    except (HfHubHTTPError, OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()
        raise MoesaicError(
            f"push {repo!r} failed ({type(error).__name__}: {reason[0] if reason else '':.160}). "
            f"The result is in {folder}."
        ) from error
    return f"{hub.endpoint}/{repo}"
