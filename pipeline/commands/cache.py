"""`trnpipe cache`, which lists, repairs and synchronises the compile cache of this machine.

The live cache is the folder or S3 prefix that the compiler on this machine reads from and writes to.
"""

from pipeline.commands import ToolCall
from pipeline.compile.cache import live_compilers, repair, status_lines
from pipeline.compile.manifest import load_manifests
from pipeline.compile.sync import sync_cache
from pipeline.core.errors import EXIT_OK, ConfigError
from pipeline.core.format import format_duration
from pipeline.core.progress import Say, use_display
from pipeline.core.stop import StopSignal
from pipeline.io.storage import Storage, open_storage
from pipeline.settings import Settings


def run(settings: Settings, stop: StopSignal, say: Say, call: ToolCall) -> int:
    """Run an action on the live cache.

    Raises ConfigError if the settings don't allow the action. Also raises DiskFull, TransientError and Preempted.
    """
    live = open_storage(settings.compile.cache_root(settings.workspace), retry=settings.storage, stop=stop)
    if call.action == "status":
        for line in status_lines(live, settings.compile.flags) + _graph_lines(settings, stop):
            say(line)
        return EXIT_OK
    from pipeline.telemetry.console import Console  # takes a while to import, and `status` does not need it

    with use_display(Console().progress):
        if call.action == "repair":
            actions = repair(live, compilers=live_compilers)
            for action in actions:
                say(action)
            say(f"cache repair {live.uri('')} | {len(actions)} actions")
        else:
            _sync(settings, live, say)
    return EXIT_OK


def _sync(settings: Settings, live: Storage, say: Say) -> None:
    root, url = live.local_path(""), settings.compile.sync_url
    if not url or root is None:
        raise ConfigError(
            f"cannot synchronise the compile cache {live.root} with compile.sync_url {url!r}",
            expected="a compile cache in a local folder, and s3://bucket/prefix as compile.sync_url",
            next_command="trnpipe cache sync --compile.cache-url FOLDER --compile.sync-url s3://bucket/prefix",
        )
    for line in sync_cache(root, open_storage(url, retry=settings.storage, stop=live.stop)).lines():
        say(line)


def _graph_lines(settings: Settings, stop: StopSignal) -> list[str]:
    """Return a line for each graph manifest in the workspace."""
    workspace = open_storage(settings.workspace, retry=settings.storage, stop=stop)
    lines = [
        f"graphs {manifest.plan_id[:12]} | {manifest.plan.get('device', 'unknown device')} | "
        f"{len(manifest.graphs)} graphs, {format_duration(manifest.compile_s)} compiling"
        for manifest in load_manifests(workspace)
    ]
    return lines or ["nothing is compiled yet: trnpipe compile"]
