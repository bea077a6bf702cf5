"""Results shared through the hub: the whole checkpoint, or the plan alone as a slim patch."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from moesaic import report
from moesaic.errors import MoesaicError
from moesaic.foreign import Named
from moesaic.io.headers import mapping_of
from moesaic.io.layout import CARD, PAGE, PICTURE, PLAN_FILES, RECIPE, RECORD, anywhere, placed
from moesaic.io.names import check_repository
from moesaic.plan import Plan
from moesaic.record import Record
from moesaic.result import Result

PATCH = (*PLAN_FILES, RECORD, RECIPE, PAGE, PICTURE)
"""Files of a result that rebuild it and say what it is, beside its card."""
WEIGHTS = ("model.safetensors*", "model-*-of-*.safetensors")
"""Files of an earlier result in the repository, which would be loaded beside a new one's."""


def push(
    result: Named, repo: str, *, plan_only: bool = False, token: str | bool | None = None
) -> str:
    """Upload a result, with its card, to a repository of the hub, which is made if there is none.

    Args:
        result: what a verb returned, or the folder that it was saved to.
        repo: ``owner/name``.
        plan_only: of its files only the plan, and those that tell of it: ``moesaic apply REPO OUT``
            rebuilds the checkpoint.

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
            return push(folder, repo, plan_only=plan_only, token=token)
    if not isinstance(result, str | Path):
        raise MoesaicError(
            f"push takes a Result or its folder; got {type(result).__name__}, whose own "
            "push_to_hub uploads it without a card."
        )
    folder = Path(result).expanduser()
    if plan_only and not all(placed(folder, name).is_file() for name in PLAN_FILES):
        raise MoesaicError(
            f"push_plan: {folder} holds no plan, for its weights were trained. Push it whole."
        )
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
    hub = HfApi(token=token)
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
