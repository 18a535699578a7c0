"""What lies in a place when the download of a file went wrong."""

from pipeline.core.errors import TrnpipeError
from pipeline.io.storage import is_lfs_pointer

HEAD_BYTES = 512


def check_downloaded(head: bytes, where: str, error: type[TrnpipeError]) -> None:
    """Raise `error` for a file that is empty, a Git LFS pointer or a web page. `head`: its first HEAD_BYTES."""
    seen, remedy = "", "download it again"
    if is_lfs_pointer(head):
        seen, remedy = "is a Git LFS pointer, not the file itself", "git lfs pull, in the folder it was cloned to"
    elif not head:
        seen = "is empty"
    elif head.lstrip()[:14].lower().startswith((b"<!doctype html", b"<html")):
        seen, remedy = (
            "is a web page",
            "download the file itself: on Hugging Face its address has /resolve/, not /blob/",
        )
    if seen:
        raise error(f"{where} {seen}", expected="the content of the file", next_command=remedy)
