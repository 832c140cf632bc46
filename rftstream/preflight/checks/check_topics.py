"""A look at the topics that a run file would use, where the log is kept by servers: others may have made or changed
them."""

from __future__ import annotations

from rftstream.config.sections import RunConfig
from rftstream.errors import LogRefused, RftError, TransportError
from rftstream.preflight.readiness import folder_of
from rftstream.runs.folder import lies_in_folder, open_transport
from rftstream.runs.log_settings import dangers, in_words


def look_at_topics(config: RunConfig) -> tuple[list[str], list[str]]:
    """Return the problems of the topics of the newest run here, or of the first one, and doubts about the look itself.

    Without servers to ask, or without topics, there is nothing to find."""
    if lies_in_folder(config):
        return [], []
    folder = folder_of(config)
    try:
        transport = open_transport(config, folder, create=True)
        try:
            found = dangers(transport, config, begun=False)
        finally:
            transport.close()
    except LogRefused as error:
        return [str(error)], []
    except TransportError as error:
        return [], [f"transport: the topics were not looked at: {error}"]
    except RftError as error:
        return [str(error)], []
    return ([in_words(folder.run_id, found)], []) if found else ([], [])
