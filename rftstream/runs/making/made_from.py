"""Makes a run from the log of another one: its model, its images, and the imported part of its log."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager

from rftstream.config.sections import RunConfig
from rftstream.models.folders.folder import prepare_model
from rftstream.models.spec import ModelSpec
from rftstream.runs.folder import OpenRun, RunFolder, create_log, open_store, open_transport
from rftstream.runs.making.create import write_config
from rftstream.runs.making.fork import copy_model
from rftstream.runs.making.imported import Import
from rftstream.runs.manifest import check_same_run, data_digests, make_manifest
from rftstream.service.control_view import read_manifest
from rftstream.transport.base import Transport
from rftstream.weights.stores.media import copy_media


@contextmanager
def begun_log(source: OpenRun, folder: RunFolder, config: RunConfig) -> Iterator[tuple[Transport, ModelSpec]]:
    """Make the missing parts of model, images and log of a run that is made from another one, and yield the log and the
    model. The caller holds the folder."""
    copy_model(source.folder, folder)
    copy_media(source.store(), open_store(config, folder))
    model = prepare_model(config.model, folder.model, config.run.seed)
    with closing(open_transport(config, folder, create=True)) as transport:
        create_log(transport, config)
        yield transport, model


def make_from(
    source: OpenRun,
    folder: RunFolder,
    config: RunConfig,
    import_into: Callable[[Transport], Import],
    *,
    changed: Sequence[str],
    other_operators: bool = False,
) -> None:
    """Make the run in the folder, ready for training. Do nothing if it exists. After a crash, a second call continues
    where the first one stopped.

    `import_into` makes the import for the new log. `changed`: the changed settings for the new run's manifest.
    ConfigError if the data differs from the other run's.
    """
    with folder.held():
        if folder.exists():
            return
        with begun_log(source, folder, config) as (transport, model):
            digests = data_digests(config, model)
            theirs = read_manifest(source.transport)
            if theirs is not None:
                check_same_run(theirs, config, digests, other_operators=other_operators)
            made = import_into(transport)
            made.run(lambda: make_manifest(config, folder.run_id, digests, time.time(), changed))
        write_config(config, folder)
